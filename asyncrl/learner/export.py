"""Writes the trained model in Hugging Face format: config, safetensors, and the tokenizer as it came."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from transformers import AutoConfig

from asyncrl.errors import LearnerError
from asyncrl.learner.finite import group_device
from asyncrl.learner.model import TensorShard
from asyncrl.models.companions import copy_companions


def export_model(
    shards: Iterable[TensorShard],
    model_path: Path,
    folder: Path,
    *,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    is_writer: bool,
) -> None:
    """Gathers every rank's shards, tensor by tensor, and writes them to `folder` on the rank that is the writer.

    `dtype`: the publish dtype, so that the folder holds bit for bit what the engines served and what was
    evaluated. Collective: every rank holds one full tensor at a time, the writer all of them in host memory.
    The folder appears at once, complete. Raises LearnerError on the writer when `folder` exists.
    """
    config = AutoConfig.from_pretrained(model_path)
    state: dict[str, Tensor] = {}
    for shard in shards:
        tensor = _gather(shard, group)
        if is_writer:
            state[shard.name] = tensor.to("cpu", dtype)
    if not is_writer:
        return
    if folder.exists():
        raise LearnerError(f"{folder} exists already; export to another folder")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_torch_state_dict(state, partial, safe_serialization=True)
    config.dtype = dtype
    config.save_pretrained(partial)
    copy_companions(model_path, partial)
    os.replace(partial, folder)


def _gather(shard: TensorShard, group: dist.ProcessGroup) -> Tensor:
    """The full tensor on every rank. Collective."""
    size, device = dist.get_world_size(group), group_device(group)
    mine = torch.tensor([shard.row_offset, len(shard.rows)], device=device)
    places = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(places, mine, group=group)
    rows_of = [(int(place[0]), int(place[1])) for place in places]
    most = max(num_rows for _, num_rows in rows_of)
    padded = torch.zeros(most, *shard.shape[1:], dtype=shard.rows.dtype, device=device)
    padded[: len(shard.rows)] = shard.rows
    pieces = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(pieces, padded, group=group)
    whole = torch.empty(shard.shape, dtype=shard.rows.dtype, device=device)
    for (first, num_rows), piece in zip(rows_of, pieces, strict=True):
        whole[first : first + num_rows] = piece[:num_rows]
    return whole
