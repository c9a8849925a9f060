"""The data set of supervised tokens (`data.supervised`): every row a prompt, and the completion that trains.

The launcher and `asyncrl check` look at it; every learner rank loads it for itself (learner/ptx.py), so nothing of it
travels. Torch-free.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from asyncrl.config import Config
from asyncrl.envs.dataset import BATCH_ROWS, SourceRows, load_rows
from asyncrl.envs.supervised_rows import SupervisedEncoder, SupervisedRow, check_supervised
from asyncrl.errors import DataError
from asyncrl.types import Int32

SUPERVISED_KEY = "data.supervised"


@dataclass(slots=True, frozen=True)
class SupervisedCounts:
    """What became of one source's rows: num_rows is the sum of the others."""

    name: str
    num_rows: int
    num_kept: int
    num_filtered: int
    """Left out by the source's `filter`."""
    num_without_completion: int
    """No token of theirs could train."""
    num_too_long: int
    """Prompt and completion together."""


@dataclass(slots=True, frozen=True)
class SupervisedDataset:
    """The N kept rows of all sources, one source after the other."""

    token_ids: Int32
    """[sum of lengths] prompt and completion of each row, end to end."""
    prompt_lengths: Int32
    """[N]"""
    completion_lengths: Int32
    """[N]"""
    starts: NDArray[np.int64]
    """[N + 1] where in `token_ids` each begins."""
    counts: tuple[SupervisedCounts, ...]
    """Of each source, in the order of the config."""

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def __getitem__(self, index: int) -> SupervisedRow:
        first, last = int(self.starts[index]), int(self.starts[index + 1])
        completion = first + int(self.prompt_lengths[index])
        return SupervisedRow(self.token_ids[first:completion], self.token_ids[completion:last])

    @property
    def sizes(self) -> list[int]:
        """Kept rows of each source."""
        return [counts.num_kept for counts in self.counts]

    @property
    def total(self) -> SupervisedCounts:
        """Of all sources."""
        return SupervisedCounts(
            name=", ".join(counts.name for counts in self.counts),
            num_rows=sum(counts.num_rows for counts in self.counts),
            num_kept=len(self),
            num_filtered=sum(counts.num_filtered for counts in self.counts),
            num_without_completion=sum(counts.num_without_completion for counts in self.counts),
            num_too_long=sum(counts.num_too_long for counts in self.counts),
        )

    @property
    def digest(self) -> int:
        """63-bit hash of every token and length: ranks compare it, since each has read the rows for itself."""
        hashed = hashlib.blake2b(digest_size=8)
        for array in (self.prompt_lengths, self.completion_lengths, self.token_ids):
            hashed.update(array.tobytes())
        return int.from_bytes(hashed.digest(), "little") >> 1


def supervised_seed(config: Config) -> int:
    """Of the order and of generators: another than those of data.train and data.eval have."""
    return config.seed + 2


def max_row_tokens(config: Config) -> int:
    """Of a row of data.supervised, prompt and completion together."""
    longest = config.data.max_supervised_tokens
    return longest or config.data.max_prompt_tokens + config.rollout.max_completion_tokens


def load_supervised(config: Config, tokenizer: PreTrainedTokenizerFast) -> SupervisedDataset:
    """`load_supervised_rows`, then `tokenize_supervised`. Raises ConfigError, DataError."""
    return tokenize_supervised(load_supervised_rows(config), config, tokenizer)


def load_supervised_rows(config: Config) -> list[SourceRows]:
    """The rows of each source, every one looked at; no source gives none. Raises ConfigError, DataError."""
    return load_rows(
        config.data.supervised, config.data, supervised_seed(config), SUPERVISED_KEY, check_supervised
    )


def tokenize_supervised(
    rows: Sequence[SourceRows], config: Config, tokenizer: PreTrainedTokenizerFast
) -> SupervisedDataset:
    """Tokenises each row once, and drops those without a completion and those that are too long. Raises DataError.

    Every source must keep at least one.
    """
    encoder, longest = SupervisedEncoder(config.data, tokenizer), max_row_tokens(config)
    kept: list[SupervisedRow] = []
    counts: list[SupervisedCounts] = []
    for of_source in rows:
        num_before, num_without_completion, num_too_long = len(kept), 0, 0
        for first in range(0, len(of_source), BATCH_ROWS):
            for row in encoder.encode(of_source, range(first, min(first + BATCH_ROWS, len(of_source)))):
                if not len(row.completion_ids):
                    num_without_completion += 1
                elif len(row.prompt_ids) + len(row.completion_ids) > longest:
                    num_too_long += 1
                else:
                    kept.append(row)
        if len(kept) == num_before:
            raise DataError(
                f"{of_source.name}: none of {len(of_source)} rows is left: {num_without_completion} have no completion "
                f"and {num_too_long} are longer than {longest} tokens; raise data.max_supervised_tokens"
            )
        counts.append(
            SupervisedCounts(
                name=of_source.name,
                num_rows=of_source.num_rows,
                num_kept=len(kept) - num_before,
                num_filtered=of_source.num_rows - len(of_source),
                num_without_completion=num_without_completion,
                num_too_long=num_too_long,
            )
        )
    return _end_to_end(kept, counts)


def _end_to_end(rows: Sequence[SupervisedRow], counts: Sequence[SupervisedCounts]) -> SupervisedDataset:
    prompts = np.array([len(row.prompt_ids) for row in rows], np.int32)
    completions = np.array([len(row.completion_ids) for row in rows], np.int32)
    pieces = [piece for row in rows for piece in (row.prompt_ids, row.completion_ids)]
    return SupervisedDataset(
        token_ids=np.concatenate([np.zeros(0, np.int32), *pieces]),
        prompt_lengths=prompts,
        completion_lengths=completions,
        starts=np.concatenate([[0], np.cumsum(prompts + completions, dtype=np.int64)]),
        counts=tuple(counts),
    )
