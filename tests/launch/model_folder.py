"""A model's folder without a model: enough for everything that is looked at before a process starts."""

from __future__ import annotations

import json
import string
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

NUM_PARAMETERS = 10 * 8 + 7


def make_model_folder(folder: Path, *, max_positions: int = 2048) -> Path:
    """Tensors [10, 8] and [7], and a tokenizer of one token a character."""
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": 100, "max_position_embeddings": max_positions})
    )
    tensors = {"a": np.zeros((10, 8), np.float32), "b": np.zeros(7, np.float32)}
    save_file(tensors, folder / "model.safetensors")
    vocab = {"<unk>": 0} | {c: i for i, c in enumerate(string.printable[:90], start=1)}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    raw.save(str(folder / "tokenizer.json"))
    return folder
