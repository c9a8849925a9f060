"""The data set as prompts: rows of a file, a generator or a task, tokenised once. Torch-free.

The coordinator and `asyncrl check` call `load_tokenizer`, `load_rows` and `tokenize`, in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Not AutoTokenizer: importing it imports torch, which takes seconds and hundreds of MB.
from transformers import PreTrainedTokenizerFast

from asyncrl.config import DataConfig
from asyncrl.envs.rows import check_rows, from_generator, generate_rows, read_jsonl
from asyncrl.envs.tasks import TASKS
from asyncrl.envs.user_code import did_you_mean
from asyncrl.errors import ConfigError, DataError, one_line
from asyncrl.types import Int32


@dataclass(slots=True, frozen=True)
class TokenizedRow:
    """One row that is short enough."""

    row: dict[str, Any]
    text: str
    """The prompt as it was tokenised: the chat template is applied."""
    token_ids: Int32
    """[P]"""
    row_index: int
    """Position in the data set as read."""


@dataclass(slots=True, frozen=True)
class Dataset:
    """The kept rows, and what was left out. `dataset[i]` is the i-th kept row."""

    source: str
    kept: list[TokenizedRow]
    num_rows: int
    """Rows as read: kept and dropped."""
    num_too_long: int
    """Rows dropped because their prompt exceeds `data.max_prompt_tokens`."""

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> TokenizedRow:
        return self.kept[index]

    @property
    def prompt_lengths(self) -> Int32:
        """[len(self)] tokens of each kept prompt."""
        return np.array([len(row.token_ids) for row in self.kept], np.int32)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model folder, from its tokenizer.json. Raises ConfigError."""
    if not (Path(path) / "tokenizer.json").is_file():
        raise ConfigError(
            f"model {str(path)!r} has no tokenizer.json; save its tokenizer there in the fast format "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    return PreTrainedTokenizerFast.from_pretrained(path)


def load_rows(data: DataConfig, seed: int) -> list[dict[str, Any]]:
    """All rows of `data.train`, checked. Raises ConfigError (unknown source), DataError (unusable rows)."""
    source, path = data.train, Path(data.train)
    if task := TASKS.get(source):
        located = from_generator(task(seed), source, data.max_rows)
    elif path.suffix == ".jsonl" or path.is_file():
        located = read_jsonl(path)
    elif ":" in source:
        located = generate_rows(source, seed, data.max_rows)
    else:
        raise ConfigError(
            f"data.train {source!r} is neither a file nor a task{did_you_mean(source, TASKS)}; "
            f"use a JSONL file, module:attr, or one of {', '.join(TASKS)}"
        )
    rows = check_rows(located, data)
    if not rows:
        raise DataError(f"{source}: no rows")
    return rows


def tokenize(rows: Sequence[dict[str, Any]], data: DataConfig, tokenizer: PreTrainedTokenizerFast) -> Dataset:
    """Tokenises each prompt once and drops those that are too long. Raises DataError.

    Chat prompts go through the chat template with the generation prompt, and get no special token but
    the template's own; string prompts get those that the tokenizer adds by itself.
    """
    prompts = [_prompt(row, data) for row in rows]
    chats = [index for index, prompt in enumerate(prompts) if isinstance(prompt, list)]
    if chats and tokenizer.chat_template is None:
        raise DataError(
            f"{data.train}, row {chats[0]} (from 0): the prompt is a list of messages, but the tokenizer of "
            f"{tokenizer.name_or_path!r} has no chat template; use a model that has one (instruct models "
            "do), add a chat_template.jinja to its folder, or make the prompts strings"
        )
    token_ids: list[list[int]] = [[] for _ in rows]
    texts = [
        prompt
        if isinstance(prompt, str)
        else _render(prompt, tokenizer, f"{data.train}, row {index} (from 0)")
        for index, prompt in enumerate(prompts)
    ]
    _encode_into(token_ids, chats, texts, tokenizer, add_special_tokens=False)
    plain = [index for index, prompt in enumerate(prompts) if isinstance(prompt, str)]
    _encode_into(token_ids, plain, texts, tokenizer, add_special_tokens=True)
    return _keep_short(rows, texts, token_ids, data)


def _prompt(row: dict[str, Any], data: DataConfig) -> Any:
    """The row's prompt: a string, or a list of messages with the system prompt in it."""
    prompt = row[data.prompt_key]
    if isinstance(prompt, str):
        if not data.as_chat:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    if data.system_prompt is not None and prompt[0]["role"] != "system":
        prompt = [{"role": "system", "content": data.system_prompt}, *prompt]
    return prompt


def _render(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast, where: str) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates raise exceptions of their own, such as "roles must alternate"
        raise DataError(f"{where}: the chat template refuses the messages: {one_line(error)}") from error
    assert isinstance(text, str)
    return text


def _encode_into(
    token_ids: list[list[int]],
    indices: list[int],
    texts: list[str],
    tokenizer: PreTrainedTokenizerFast,
    add_special_tokens: bool,
) -> None:
    if not indices:
        return
    chosen = [texts[index] for index in indices]
    encoded = tokenizer(
        chosen, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False
    )
    for index, ids in zip(indices, encoded["input_ids"], strict=True):
        token_ids[index] = ids


def _keep_short(
    rows: Sequence[dict[str, Any]], texts: list[str], token_ids: list[list[int]], data: DataConfig
) -> Dataset:
    kept: list[TokenizedRow] = []
    for index, (row, text, ids) in enumerate(zip(rows, texts, token_ids, strict=True)):
        if not ids:
            raise DataError(f"{data.train}, row {index} (from 0): the prompt has no tokens")
        if len(ids) <= data.max_prompt_tokens:
            kept.append(TokenizedRow(row, text, np.array(ids, np.int32), index))
    if not kept:
        raise DataError(
            f"{data.train}: all {len(rows)} prompts are longer than data.max_prompt_tokens "
            f"{data.max_prompt_tokens} (the shortest has {min(map(len, token_ids), default=0)}); raise it"
        )
    return Dataset(data.train, kept, num_rows=len(rows), num_too_long=len(rows) - len(kept))
