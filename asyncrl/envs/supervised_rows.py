"""From a row of `data.supervised` to the tokens of its prompt and of the completion that trains.

Called by supervised.py. A row has one of:
messages              the last one, of the assistant, is the completion, those before it are the prompt
prompt, completion    strings, or lists of messages
text                  every token trains but the first, which nothing predicts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from asyncrl.config import DataConfig
from asyncrl.envs.dataset import SourceRows
from asyncrl.envs.prompts import PromptEncoder, encode
from asyncrl.envs.rows import prompt_problem
from asyncrl.errors import DataError
from asyncrl.types import Int32


@dataclass(slots=True, frozen=True)
class SupervisedRow:
    """One row that is kept."""

    prompt_ids: Int32
    """[P], at least one"""
    completion_ids: Int32
    """[C], at least one"""


def check_supervised(row: dict[str, Any], where: object) -> None:
    """Raises DataError for a row that is no supervised one."""
    if row.get("messages") is not None:
        _check_messages(row["messages"], f"{where}, column 'messages'")
    elif row.get("completion") is not None:
        if "prompt" not in row:
            raise DataError(
                f"{where}, column 'prompt': missing, and there is a completion; set columns.prompt"
            )
        if problem := prompt_problem(row["prompt"]):
            raise DataError(f"{where}, column 'prompt': {problem}")
        completion = row["completion"]
        # An empty one is left out and counted.
        if completion not in ("", []) and (problem := prompt_problem(completion)):
            raise DataError(f"{where}, column 'completion': {problem.replace('a prompt', 'a completion')}")
    elif row.get("text") is None:
        raise DataError(
            f"{where}: a row of data.supervised has prompt and completion, or messages, or text, and this one has "
            f"{', '.join(sorted(row))}; name them with columns of the source: columns: {{completion: answer}}"
        )
    elif not isinstance(row["text"], str):
        raise DataError(f"{where}, column 'text': {type(row['text']).__name__}; it must be a string")


def _check_messages(messages: object, where: str) -> None:
    if problem := prompt_problem(messages):
        raise DataError(f"{where}: {problem.replace('a prompt', 'a conversation')}")
    if not isinstance(messages, list) or len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise DataError(
            f"{where}: the last message is what trains: it must be the assistant's, with at least one before it"
        )


@dataclass(slots=True, frozen=True)
class _Texts:
    """One row before the tokenizer."""

    prompt: str
    completion: str
    is_chat: bool = False
    is_whole: bool = False
    """A text alone: `prompt` is all of it."""


class SupervisedEncoder:
    """Prompts as the rollouts have them, and the completion's tokens after them, each tokenised by itself: so a
    completion is what the policy could have sampled.

    A string ends with the tokenizer's EOS token, added where it is missing; a conversation with what the template puts
    there, white space left out.
    """

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerFast) -> None:
        self._prompts = PromptEncoder(data.model_copy(update={"prompt_key": "prompt"}), tokenizer)
        self._tokenizer = tokenizer
        self._as_chat = data.as_chat

    def encode(self, rows: SourceRows, indices: Sequence[int]) -> list[SupervisedRow]:
        """Each of these rows; its completion is empty where nothing can train. Raises DataError."""
        texts = [self._texts(rows[index], rows.where(index)) for index in indices]
        prompts = encode(self._tokenizer, [text.prompt for text in texts], [not t.is_chat for t in texts])
        completions = encode(self._tokenizer, [text.completion for text in texts], [False] * len(texts))
        found: list[SupervisedRow] = []
        for index, text, prompt, completion in zip(indices, texts, prompts, completions, strict=True):
            if text.is_whole:
                ids = self._ended(prompt) if text.prompt else []
                prompt, completion = ids[:1], ids[1:]
            else:
                if not prompt:
                    raise DataError(f"{rows.where(index)}: the prompt has no tokens")
                if completion and not text.is_chat:
                    completion = self._ended(completion)
            found.append(SupervisedRow(np.array(prompt, np.int32), np.array(completion, np.int32)))
        return found

    def _ended(self, token_ids: list[int]) -> list[int]:
        eos: Any = self._tokenizer.eos_token_id
        return token_ids if eos is None or token_ids[-1:] == [eos] else [*token_ids, eos]

    def _texts(self, row: Mapping[str, Any], where: object) -> _Texts:
        if (messages := row.get("messages")) is not None:
            return self._conversation(messages[:-1], messages[-1:], where)
        if (completion := row.get("completion")) is None:
            return _Texts(row["text"], "", is_whole=True)
        if self._as_chat or isinstance(row["prompt"], list):
            said = (
                [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
            )
            return self._conversation(row["prompt"], said, where)
        if not isinstance(completion, str):
            raise DataError(
                f"{where}, column 'completion': a list of messages after a prompt that is a string; set data.as_chat: "
                "true, or make both strings"
            )
        return _Texts(self._prompts.text(row, where), completion)

    def _conversation(self, prompt: Any, answer: Sequence[Mapping[str, Any]], where: object) -> _Texts:
        text = self._prompts.text({"prompt": prompt}, where)
        if not any(message["content"].strip() for message in answer):
            return _Texts(text, "", is_chat=True)
        whole = self._prompts.text({"prompt": prompt}, where, answer)
        if not whole.startswith(text):
            raise DataError(
                f"{where}: with the completion the chat template writes another prompt than without it, "
                f"{whole[: len(text)][-60:]!r} for {text[-60:]!r}; give prompt and completion as strings"
            )
        return _Texts(text, whole[len(text) :].rstrip(), is_chat=True)
