"""From a row to its prompt: the text after the chat template, and its token ids. Called by dataset.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Not AutoTokenizer: importing it imports torch, which takes seconds and hundreds of MB.
from transformers import PreTrainedTokenizerFast

from asyncrl.config import DataConfig
from asyncrl.errors import DataError, one_line


class PromptEncoder:
    """Chat prompts get the template once, with the generation prompt, and no special token but its own.

    String prompts are taken as they are and get the special tokens that the tokenizer adds by itself.
    """

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerFast) -> None:
        self._data = data
        self._tokenizer = tokenizer

    def text(self, row: Mapping[str, Any], where: object, answer: Sequence[Mapping[str, Any]] = ()) -> str:
        """The prompt as it is tokenised; with the messages of an `answer`, which a string prompt has none of, the whole
        conversation. Raises DataError naming `where` when there is no template for it.

        So does a string while there is a system prompt, which would go nowhere.
        """
        prompt = self._prompt(row)
        if isinstance(prompt, str):
            if self._data.system_prompt is not None:
                raise DataError(
                    f"{where}: the prompt is a string, and data.system_prompt {self._data.system_prompt!r:.60} goes "
                    "before messages; set data.as_chat: true, or leave data.system_prompt out"
                )
            return prompt
        if self._tokenizer.chat_template is None:
            if isinstance(row[self._data.prompt_key], str):
                what, otherwise = "data.as_chat makes the prompt a message", "leave data.as_chat out"
            else:
                what, otherwise = "the prompt is a list of messages", "make the prompts strings"
            raise DataError(
                f"{where}: {what}, but the tokenizer of {self._tokenizer.name_or_path!r} has no chat template; use a "
                f"model that has one (instruct models do), add a chat_template.jinja to its folder, or {otherwise}"
            )
        messages = prompt + [_without_nulls(message) for message in answer]
        try:
            text = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=not answer, tokenize=False
            )
        except Exception as error:  # templates raise exceptions of their own, such as "roles must alternate"
            raise DataError(f"{where}: the chat template refuses the messages: {one_line(error)}") from error
        assert isinstance(text, str)
        return text

    def token_ids(self, rows: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[list[int]]:
        """Of each row, whose text is given. Called with many at once: the tokenizer works on them in parallel."""
        return encode(self._tokenizer, texts, [isinstance(self._prompt(row), str) for row in rows])

    def _prompt(self, row: Mapping[str, Any]) -> Any:
        """A string, or a list of messages with the system prompt in it."""
        prompt = row[self._data.prompt_key]
        if isinstance(prompt, str):
            if not self._data.as_chat:
                return prompt
            prompt = [{"role": "user", "content": prompt}]
        messages = [_without_nulls(message) for message in prompt]
        system_prompt = self._data.system_prompt
        if system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system_prompt})
        return messages


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Arrow gives every message the keys of all of them; templates ask whether a key is there."""
    return {key: value for key, value in message.items() if value is not None}


def encode(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], add_special_tokens: Sequence[bool]
) -> list[list[int]]:
    """Token ids of each text, with the special tokens that the tokenizer adds by itself where that is asked for."""
    token_ids: list[list[int]] = [[] for _ in texts]
    for added in (True, False):
        indices = [index for index, wanted in enumerate(add_special_tokens) if wanted is added]
        if not indices:
            continue
        encoded = tokenizer(
            [texts[index] for index in indices],
            add_special_tokens=added,
            return_attention_mask=False,
            verbose=False,
        )
        for index, ids in zip(indices, encoded["input_ids"], strict=True):
            token_ids[index] = ids
    return token_ids
