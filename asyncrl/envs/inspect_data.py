"""What `asyncrl data` prints: what became of each source's rows, prompt lengths, and the first prompts as tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from transformers import PreTrainedTokenizerFast

from asyncrl.config import Config, DataConfig
from asyncrl.envs.dataset import Dataset, SourceCounts, TokenizedRow
from asyncrl.envs.rows import answer_of
from asyncrl.envs.supervised import SupervisedDataset, max_row_tokens
from asyncrl.types import Int32

NUM_IDS_SHOWN = 32
"""Token ids printed of a prompt, from its start."""


def describe(
    dataset: Dataset, data: DataConfig, tokenizer: PreTrainedTokenizerFast, num_rows: int
) -> Iterator[str]:
    """Lines of text; the first `num_rows` kept rows of each source are shown whole.

    Their text is what their tokens say: with what the tokenizer adds, and without what it does not know.
    """
    for counts, part in zip(dataset.counts, dataset.parts, strict=True):
        share = f", {counts.share:.1%} of the prompts" if len(dataset.parts) > 1 else ""
        yield f"{counts.name}: {counts.num_kept} of {counts.num_rows} rows kept{share}"
        yield from _dropped(counts, part.rows.is_cut, data)
        yield f"  prompt tokens: {lengths_in_words(np.diff(part.starts).astype(np.int32))}"
        for index in range(min(num_rows, len(part))):
            kept = part[index]
            text = tokenizer.decode(kept.token_ids.tolist(), clean_up_tokenization_spaces=False)
            assert isinstance(text, str)
            yield from _row(kept, text, part.rows.where(int(part.kept[index])), data)
    if len(dataset.parts) > 1:
        yield f"all {len(dataset.parts)} sources: {len(dataset)} of {dataset.num_rows} rows kept"
        yield f"  prompt tokens: {lengths_in_words(dataset.prompt_lengths)}"


def describe_supervised(
    dataset: SupervisedDataset, config: Config, tokenizer: PreTrainedTokenizerFast, num_rows: int
) -> Iterator[str]:
    """As `describe`, of data.supervised; what trains of a row stands apart."""
    first = 0
    for counts in dataset.counts:
        yield f"{counts.name}: {counts.num_kept} of {counts.num_rows} rows kept"
        for number, what in (
            (counts.num_filtered, "left out by its filter"),
            (counts.num_without_completion, "without a completion"),
            (
                counts.num_too_long,
                f"longer than {max_row_tokens(config)} tokens (data.max_supervised_tokens)",
            ),
        ):
            if number:
                yield f"  {number} {what}"
        own = slice(first, first + counts.num_kept)
        yield f"  prompt tokens: {lengths_in_words(dataset.prompt_lengths[own])}"
        yield f"  tokens that train: {lengths_in_words(dataset.completion_lengths[own])}"
        for index in range(first, first + min(num_rows, counts.num_kept)):
            row = dataset[index]
            lengths = f"{len(row.prompt_ids)} tokens, then {len(row.completion_ids)} train"
            yield f"  kept row {index - first} (from 0): {lengths}"
            for mark, ids in (("|", row.prompt_ids), (">", row.completion_ids)):
                text = tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)
                assert isinstance(text, str)
                yield from (f"    {mark} {line}" for line in text.split("\n"))
        first += counts.num_kept


def lengths_in_words(lengths: Int32) -> str:
    """Minimum, mean, percentiles (lengths that occur) and maximum of [N] lengths."""
    p50, p95 = np.percentile(lengths, [50, 95], method="inverted_cdf")
    return f"min {lengths.min()}  mean {lengths.mean():.1f}  p50 {p50}  p95 {p95}  max {lengths.max()}"


def _dropped(counts: SourceCounts, is_cut: bool, data: DataConfig) -> Iterator[str]:
    if is_cut:
        yield f"  only its first {data.max_rows} rows, as data.max_rows says; it has more"
    if counts.num_filtered:
        yield f"  {counts.num_filtered} left out by its filter"
    if counts.num_too_long:
        yield f"  {counts.num_too_long} longer than data.max_prompt_tokens {data.max_prompt_tokens}"


def _row(kept: TokenizedRow, text: str, where: str, data: DataConfig) -> Iterator[str]:
    ids = kept.token_ids.tolist()
    more = f" ... {len(ids) - NUM_IDS_SHOWN} more" if len(ids) > NUM_IDS_SHOWN else ""
    yield f"  {where}: {len(ids)} tokens, answer {answer_of(kept.row, data)!r}"
    yield from (f"    | {line}" for line in text.split("\n"))
    yield f"    {' '.join(map(str, ids[:NUM_IDS_SHOWN]))}{more}"
