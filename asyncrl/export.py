"""`asyncrl export`: a trained model as a folder for transformers, vLLM and the Hub, in the dtype asked for.

source (a run, or a folder in Hugging Face format) -> safetensors, tensor by tensor -> config, tokenizer, card

Tensors are mapped from their files and written one at a time, so memory holds one of them. No pickle is read or
written. torch is imported where tensors are cast.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import split_state_dict_into_shards_factory

from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from asyncrl.launch.model_facts import read_model_config
from asyncrl.model_card import CARD_NAME, read_lines, write_model_card
from asyncrl.models.companions import copy_companions

if TYPE_CHECKING:
    from torch import Tensor

CAST_TO = {"bfloat16": "BF16", "float32": "F32"}
"""What --dtype may name, and what safetensors calls it."""
FLOATS = {"F64", "F32", "F16", "BF16"}
"""What is cast; whole numbers and quantized weights stay as they are."""
ITEMSIZES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
"""Bytes of an element, by safetensors' names."""
MAX_SHARD_SIZE = "5GB"
"""Of one file of weights: huggingface_hub's default."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ExportSource:
    """Where a model is, and the run that it came from."""

    model: Path
    """A folder in Hugging Face format."""
    run: Path | None
    """The run directory, for the figures of the card; None when it is not known."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    name: str
    file: Path
    dtype: str
    """As safetensors names it: F32, BF16, ..."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZES[self.dtype]


def export_folder(source: Path, out: Path, dtype: str | None = None) -> list[StoredTensor]:
    """Writes the model of `source` to the new folder `out`; returns what was written.

    `dtype`: bfloat16 or float32; None keeps what is stored. `out` appears at once, complete. Raises ConfigError
    for a source without a model, an `out` that exists, and a dtype that is neither.
    """
    if dtype is not None and dtype not in CAST_TO:
        raise ConfigError(f"--dtype: {dtype!r} is not known; use {' or '.join(CAST_TO)}, or leave it out")
    if out.exists():
        raise ConfigError(f"{out} exists already; export to a new folder")
    found = find_source(source)
    tensors = find_tensors(found.model)
    partial = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be made ({error.strerror}); export to another folder") from error
    try:
        written = _write_weights(tensors, partial, dtype)
        _write_config(found.model, partial, dtype)
        copy_companions(found.model, partial)
        _write_card(found, partial)
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return written


def find_source(path: Path) -> ExportSource:
    """What `path` is: a run directory, or a model's folder (which may be a run's). Raises ConfigError."""
    if (path / "config.json").is_file():
        run = path.resolve().parent
        # Others may have a config.yaml too.
        is_run = all((run / name).is_file() for name in ("config.yaml", "metrics.jsonl"))
        return ExportSource(path, run if is_run else None)
    if not (path / "config.yaml").is_file():
        raise ConfigError(
            f"{path} is neither a run directory (it has no config.yaml) nor a model's folder (no config.json)"
        )
    if not (path / "model" / "config.json").is_file():
        raise ConfigError(f"{path} has no model: {_why_no_model(path)}")
    return ExportSource(path / "model", path)


def find_tensors(model_path: Path) -> list[StoredTensor]:
    """The tensors of a model's folder from the headers of its files, a tied head left out. Raises ConfigError."""
    from safetensors import SafetensorError, safe_open

    files = [model_path / name for name in _weight_files(model_path)]
    tensors: list[StoredTensor] = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (a handle of safetensors, not a dict)
                    stored = opened.get_slice(name)
                    shape = tuple(stored.get_shape())
                    tensors.append(StoredTensor(name, file, stored.get_dtype(), shape))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file} is not a safetensors file ({error}); write it again") from error
    if unknown := sorted({tensor.dtype for tensor in tensors} - set(ITEMSIZES)):
        raise ConfigError(f"{model_path} holds tensors of dtype {unknown[0]}, which asyncrl cannot export")
    head = next((tensor for tensor in tensors if tensor.name == HEAD), None)
    if head is not None and read_model_config(model_path).get("tie_word_embeddings"):
        rest = [tensor for tensor in tensors if tensor is not head]
        if any(_are_equal(head, tensor) for tensor in rest):
            return rest
    return tensors


def _weight_files(model_path: Path) -> list[str]:
    if (model_path / WEIGHTS).is_file():
        return [WEIGHTS]
    if not (model_path / INDEX).is_file():
        raise ConfigError(f"{model_path} has neither {WEIGHTS} nor {INDEX}; asyncrl reads no other format")
    try:
        return sorted(set(json.loads((model_path / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{model_path / INDEX} cannot be read: {error!r}") from error


def _why_no_model(run: Path) -> str:
    config = load_config(run / "config.yaml")
    if not config.learner.export:
        return "learner.export was false; train with learner.export=true"
    metrics = read_lines(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else []
    version = max((int(line["training/policy_version"]) for line in metrics), default=0)
    return f"it did not end, it has {version} of {config.learner.max_versions} versions; look into {run / 'logs'}"


def _write_weights(tensors: list[StoredTensor], folder: Path, dtype: str | None) -> list[StoredTensor]:
    """One file, or several with an index, named as transformers names them. Returns them as written."""
    cast = {
        tensor.name: replace(tensor, dtype=CAST_TO[dtype])
        if dtype is not None and tensor.dtype in FLOATS
        else tensor
        for tensor in tensors
    }
    split = split_state_dict_into_shards_factory(
        cast,
        get_storage_size=lambda tensor: tensor.num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_SHARD_SIZE,
    )
    for file_name, names in split.filename_to_tensors.items():
        write_safetensors(folder / file_name, [cast[name] for name in names], load_tensor)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return list(cast.values())


def write_safetensors(
    path: Path, tensors: Iterable[StoredTensor], load: Callable[[StoredTensor], Tensor]
) -> None:
    """A safetensors file, a tensor at a time: `load` gives one of the dtype and shape that it is described with.

    The format: 8 bytes with the header's length, the header (JSON, padded to 8 bytes), then the tensors without
    gaps; wider dtypes first, so that each is aligned. safetensors' own writer wants all of them in memory.
    """
    import torch

    ordered = sorted(tensors, key=lambda tensor: (-ITEMSIZES[tensor.dtype], tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        begin, end = end, end + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in ordered:
            file.write(load(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().data)


def load_tensor(tensor: StoredTensor) -> Tensor:
    """The tensor from its file, cast where `tensor.dtype` is another than is stored."""
    import torch
    from safetensors import safe_open

    with safe_open(tensor.file, framework="pt") as opened:
        loaded: Tensor = opened.get_tensor(tensor.name)
    cast_to = {stored: getattr(torch, name) for name, stored in CAST_TO.items()}
    return loaded.to(cast_to.get(tensor.dtype, loaded.dtype))


def _are_equal(a: StoredTensor, b: StoredTensor) -> bool:
    import torch

    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(load_tensor(a), load_tensor(b))


def _write_config(model_path: Path, folder: Path, dtype: str | None) -> None:
    config = read_model_config(model_path)
    if dtype is not None:
        _set_dtype(config, dtype)
        config["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Also of the tables inside, such as a text_config; older files say torch_dtype."""
    if config.pop("torch_dtype", None) is not None:
        config["dtype"] = dtype
    for key, value in config.items():
        if isinstance(value, dict):
            _set_dtype(value, dtype)
        elif key == "dtype":
            config[key] = dtype


def _write_card(source: ExportSource, folder: Path) -> None:
    """Of the run; without one, the card that the source has."""
    if source.run is not None:
        write_model_card(source.run, folder)
    elif (source.model / CARD_NAME).is_file():
        shutil.copyfile(source.model / CARD_NAME, folder / CARD_NAME)
