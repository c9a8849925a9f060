"""The data set as prompts: the rows of all its sources, checked and tokenised once. Torch-free.

The coordinator's process, `asyncrl check` and `asyncrl data` call `load_rows` (which needs no model) and then
`tokenize`; `load_dataset` is both. Kept in memory are the positions of the kept rows and the prompts' token ids;
a row itself is read from its source when it is leased.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

# Not AutoTokenizer: importing it imports torch, which takes seconds and hundreds of MB.
from transformers import PreTrainedTokenizerFast

from asyncrl.config import DataConfig, SourceConfig
from asyncrl.envs.mixture import integer_weights, shares, takes_turns
from asyncrl.envs.prompts import PromptEncoder
from asyncrl.envs.rows import check_prompt, shape_row
from asyncrl.envs.sources import Listed, RowTable, open_source
from asyncrl.errors import ConfigError, DataError, one_line
from asyncrl.types import Int32
from asyncrl.user_code import import_function

BATCH_ROWS = 1000
"""Prompts that are tokenised at once."""
RowCheck = Callable[[dict[str, Any], object], None]
"""(row, where it is from) -> raises DataError for one that is unusable."""


@dataclass(slots=True, frozen=True)
class TokenizedRow:
    """One row that is kept."""

    row: dict[str, Any]
    token_ids: Int32
    """[P]"""
    row_index: int
    """Position in its source as read."""
    render: Callable[[], str] = field(repr=False)

    @property
    def text(self) -> str:
        """The prompt as it was tokenised: the chat template is applied, anew at every call."""
        return self.render()


class SourceRows(Sequence[dict[str, Any]]):
    """The rows of one source that its filter keeps, each read, shaped and converted when it is asked for."""

    def __init__(self, table: RowTable, source: SourceConfig, positions: NDArray[np.int64]) -> None:
        self.name = source.path
        self.weight = source.weight
        self.num_rows = len(table)
        """As read: kept and filtered."""
        self.is_cut = isinstance(table, Listed) and table.is_cut
        """Whether it is a generator that has more than `data.max_rows`."""
        self.positions = positions
        """[len(self)] of the kept rows in the source."""
        self._table = table
        self._columns = source.columns

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = int(self.positions[index])
        return shape_row(self._table[position], self._columns, Where(self._table, position))

    def where(self, index: int) -> str:
        """Names the kept row for an error."""
        return self._table.where(int(self.positions[index]))


@dataclass(slots=True, frozen=True)
class Where:
    """A row's name, made when it is needed."""

    table: RowTable
    position: int

    def __str__(self) -> str:
        return self.table.where(self.position)


@dataclass(slots=True, frozen=True)
class SourceCounts:
    """What became of one source's rows: num_rows = num_kept + num_filtered + num_too_long."""

    name: str
    num_rows: int
    num_kept: int
    num_filtered: int
    """Left out by the source's `filter`."""
    num_too_long: int
    """Their prompt exceeds `data.max_prompt_tokens`."""
    share: float
    """Of the run's prompts that come from here."""


@dataclass(slots=True, frozen=True)
class SourcePrompts:
    """One source's prompts that are short enough."""

    rows: SourceRows
    kept: NDArray[np.int64]
    """[N] their indices in `rows`."""
    token_ids: Int32
    """[sum of lengths] of all prompts, one after the other."""
    starts: NDArray[np.int64]
    """[N + 1] where in `token_ids` each begins."""
    encoder: PromptEncoder

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> TokenizedRow:
        kept = int(self.kept[index])
        row = self.rows[kept]
        return TokenizedRow(
            row,
            self.token_ids[self.starts[index] : self.starts[index + 1]],
            int(self.rows.positions[kept]),
            render=lambda: self.encoder.text(row, self.rows.where(kept)),
        )


class Dataset:
    """The kept prompts of all sources, one source after the other. `dataset[i]` is the i-th kept row."""

    def __init__(self, parts: Sequence[SourcePrompts]) -> None:
        self.parts = tuple(parts)
        self._starts = [0, *accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> TokenizedRow:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._starts, index) - 1
        return self.parts[number][index - self._starts[number]]

    def __iter__(self) -> Iterator[TokenizedRow]:
        return chain.from_iterable((part[i] for i in range(len(part))) for part in self.parts)

    @property
    def source(self) -> str:
        """The sources' names, for people."""
        return ", ".join(part.rows.name for part in self.parts)

    @property
    def sizes(self) -> list[int]:
        """Kept prompts of each source."""
        return [len(part) for part in self.parts]

    @property
    def weights(self) -> list[float]:
        """Of each source."""
        return [part.rows.weight for part in self.parts]

    @property
    def counts(self) -> list[SourceCounts]:
        """Of each source, in the order of the config."""
        return [
            SourceCounts(
                name=part.rows.name,
                num_rows=part.rows.num_rows,
                num_kept=len(part),
                num_filtered=part.rows.num_rows - len(part.rows),
                num_too_long=len(part.rows) - len(part),
                share=share,
            )
            for part, share in zip(self.parts, shares(self.sizes, self.weights), strict=True)
        ]

    @property
    def num_rows(self) -> int:
        """Rows as read: kept and dropped."""
        return sum(counts.num_rows for counts in self.counts)

    @property
    def num_filtered(self) -> int:
        return sum(counts.num_filtered for counts in self.counts)

    @property
    def num_too_long(self) -> int:
        return sum(counts.num_too_long for counts in self.counts)

    @property
    def prompt_lengths(self) -> Int32:
        """[len(self)] tokens of each kept prompt."""
        return np.concatenate([np.zeros(0, np.int64), *(np.diff(part.starts) for part in self.parts)]).astype(
            np.int32
        )


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model folder, from its tokenizer.json. Raises ConfigError."""
    if not (Path(path) / "tokenizer.json").is_file():
        raise ConfigError(
            f"model {str(path)!r} has no tokenizer.json; save its tokenizer there in the fast format "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    return PreTrainedTokenizerFast.from_pretrained(path)


def load_dataset(
    sources: Sequence[SourceConfig],
    data: DataConfig,
    seed: int,
    tokenizer: PreTrainedTokenizerFast,
    key: str = "data.train",
) -> Dataset:
    """`load_rows`, then `tokenize`. Raises ConfigError, DataError."""
    return tokenize(load_rows(sources, data, seed, key), data, tokenizer)


def load_rows(
    sources: Sequence[SourceConfig],
    data: DataConfig,
    seed: int,
    key: str = "data.train",
    check_row: RowCheck | None = None,
) -> list[SourceRows]:
    """The rows of each source, every one looked at: shape, values, filter, prompt (or what `check_row` looks at).

    `seed` is given to generators; `key` is where the config names the sources, for errors. Raises ConfigError
    (unknown source, filter or weights), DataError (unusable rows, or none).
    """
    if takes_turns(weights := [source.weight for source in sources]):
        integer_weights(weights)
    return [
        examine(open_source(source, seed, data.max_rows, key), source, data, key, check_row)
        for source in sources
    ]


def examine(
    table: RowTable,
    source: SourceConfig,
    data: DataConfig,
    key: str = "data.train",
    check_row: RowCheck | None = None,
) -> SourceRows:
    """Reads every row once and remembers which are kept. Raises ConfigError, DataError."""
    check_row = check_row or (lambda row, where: check_prompt(row, data.prompt_key, where))
    keep = import_function(source.filter, f"{key}: filter") if source.filter is not None else None
    kept = array("q")
    for position in range(len(table)):
        where = Where(table, position)
        row = shape_row(table[position], source.columns, where)
        if keep is None or _passes(keep, row, source.filter, where):
            check_row(row, where)
            kept.append(position)
    if not len(table):
        raise DataError(f"{source.path}: no rows")
    if not kept:
        raise DataError(f"{source.path}: the filter {source.filter!r} leaves none of {len(table)} rows")
    return SourceRows(table, source, np.array(kept, np.int64))


def _passes(keep: Callable[..., Any], row: dict[str, Any], spec: str | None, where: Where) -> bool:
    try:
        return bool(keep(row))
    except (Exception, SystemExit) as error:
        raise DataError(f"{where}: the filter {spec!r} failed with {one_line(error)}") from error


def tokenize(rows: Sequence[SourceRows], data: DataConfig, tokenizer: PreTrainedTokenizerFast) -> Dataset:
    """Tokenises each prompt once and drops those that are too long. Raises DataError.

    Every source must keep at least one.
    """
    encoder = PromptEncoder(data, tokenizer)
    return Dataset([_tokenize_source(of_source, data.max_prompt_tokens, encoder) for of_source in rows])


def _tokenize_source(rows: SourceRows, max_tokens: int, encoder: PromptEncoder) -> SourcePrompts:
    lengths = np.zeros(len(rows), np.int64)
    pieces: list[Int32] = []
    for first in range(0, len(rows), BATCH_ROWS):
        batch = rows[first : first + BATCH_ROWS]
        texts = [encoder.text(row, rows.where(index)) for index, row in enumerate(batch, start=first)]
        token_ids = encoder.token_ids(batch, texts)
        lengths[first : first + len(batch)] = [len(ids) for ids in token_ids]
        short = (ids for ids in token_ids if len(ids) <= max_tokens)
        pieces.append(np.fromiter(chain.from_iterable(short), np.int32))
    if not lengths.all():
        raise DataError(f"{rows.where(int(np.argmin(lengths)))}: the prompt has no tokens")
    kept = np.flatnonzero(lengths <= max_tokens)
    if not len(kept):
        raise DataError(
            f"{rows.name}: all {len(rows)} prompts are longer than data.max_prompt_tokens {max_tokens} (the "
            f"shortest has {lengths.min()}); raise it"
        )
    starts = np.concatenate([[0], np.cumsum(lengths[kept])])
    return SourcePrompts(rows, kept, np.concatenate(pieces), starts, encoder)
