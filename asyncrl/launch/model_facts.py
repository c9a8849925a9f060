"""What a model folder says of itself, read without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.config.learner import LoraTable
from asyncrl.errors import ConfigError
from asyncrl.user_code import did_you_mean


def read_model_config(model_path: Path) -> dict[str, Any]:
    """config.json of a model folder. Raises ConfigError."""
    try:
        return json.loads((model_path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {model_path}/config.json cannot be read: {error}") from error


def read_vocab_size(model_path: Path) -> int:
    """Rows of the embedding: every token id is below it."""
    model = read_model_config(model_path)
    vocab_size = model.get("vocab_size") or model.get("text_config", {}).get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ConfigError(f"model: {model_path}/config.json has no vocab_size")
    return vocab_size


def read_hidden_size(model_path: Path) -> int:
    """Width of the model's hidden states."""
    model = read_model_config(model_path)
    hidden_size = model.get("hidden_size") or model.get("text_config", {}).get("hidden_size")
    if not isinstance(hidden_size, int):
        raise ConfigError(f"model: {model_path}/config.json has no hidden_size")
    return hidden_size


def check_length(
    model_path: Path,
    num_tokens: int,
    key: str = "",
    *,
    what: str = "data.max_prompt_tokens + max_completion_tokens (of rollout or eval)",
) -> None:
    """Raises ConfigError when prompt and completion together may exceed the model's positions.

    `key`: that names the model, where it is not the policy. `what`: bounds prompt and completion.
    """
    model = read_model_config(model_path)
    key = f"{key}: " if key else ""
    longest = model.get("max_position_embeddings") or model.get("text_config", {}).get(
        "max_position_embeddings"
    )
    if isinstance(longest, int) and num_tokens > longest:
        raise ConfigError(
            f"{key}{what} = {num_tokens}, and {model_path} has {longest} positions (max_position_embeddings); lower "
            "that"
        )


def check_tensor_parallel(model_path: Path, size: int, key: str = "") -> None:
    """Raises ConfigError when `size` tensor ranks cannot share the model's heads or feed-forward width evenly.

    Whether transformers has a plan for the model is seen where torch is loaded: by the learner ranks.
    """
    model = read_model_config(model_path)
    model |= model.get("text_config", {})
    key = f"{key}: " if key else ""
    for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        number = model.get(what)
        if isinstance(number, int) and number % size:
            raise ConfigError(
                f"{key}learner.tensor_parallel_size {size} does not divide {what} {number} of {model_path}; use one "
                "that does, or 1"
            )


def adapted_layers(model_path: Path, lora: LoraTable) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each matrix of a block that gets an adapter.

    Raises ConfigError for a target that is none: peft would ignore it beside others, or fail once all is loaded.
    """
    layers = {
        name.removesuffix(".weight"): shape
        for name, shape in read_tensor_shapes(model_path).items()
        if ".layers." in name and len(shape) == 2
    }
    if lora.target_modules == ("all-linear",) or not layers:
        return layers
    for target in lora.target_modules:
        if not any(name.endswith(f".{target}") for name in layers):
            names = sorted({name.rpartition(".")[2] for name in layers})
            raise ConfigError(
                f"learner.lora.target_modules: {target!r} is no linear layer of a block of {model_path}"
                f"{did_you_mean(target, names)}; there are {', '.join(names)}, or [all-linear] alone, for all of them"
            )
    return {n: shape for n, shape in layers.items() if any(n.endswith(f".{t}") for t in lora.target_modules)}


def read_tensor_shapes(model_path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes in the folder's safetensors files (tied tensors once), from their headers alone.

    Raises ConfigError when there are none: asyncrl reads weights in no other format.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(model_path.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            header.pop("__metadata__", None)
            shapes |= {name: tuple(tensor["shape"]) for name, tensor in header.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ConfigError(f"model: {file} is not a safetensors file ({error}); fetch it again") from error
    if not shapes:
        raise ConfigError(f"model: {model_path} holds no *.safetensors; save its weights in that format")
    return shapes
