"""A Dataset whose token ids are given, for tests that have no tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from asyncrl.config import DataConfig, SourceConfig
from asyncrl.envs.dataset import Dataset, SourcePrompts, SourceRows
from asyncrl.envs.prompts import PromptEncoder
from asyncrl.envs.sources import Listed
from asyncrl.types import Int32


def dataset_of(rows: Sequence[dict[str, Any]], token_ids: Sequence[Int32], name: str = "test") -> Dataset:
    """Every row is kept. Their prompts are strings, whose text is shown as it is."""
    positions = np.arange(len(rows), dtype=np.int64)
    of_source = SourceRows(Listed(rows, name), SourceConfig(path=name), positions)
    starts = np.cumsum([0, *map(len, token_ids)])
    encoder = PromptEncoder(
        DataConfig(), PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel()))
    )
    return Dataset([SourcePrompts(of_source, positions, np.concatenate(list(token_ids)), starts, encoder)])
