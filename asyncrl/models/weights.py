"""A model folder's weights as a transformers model: all of them, or an error that names what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.errors import ConfigError


def load_causal_lm(folder: Path, **options: Any) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained(folder, **options)`, every weight of it from the folder.

    Raises ConfigError where weights are missing: transformers would draw them at random and go on.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise ConfigError(
            f"model: {folder} has no weights for {missing[0]} (missing: {len(missing)}); export it again, "
            "or correct its config.json"
        )
    return model
