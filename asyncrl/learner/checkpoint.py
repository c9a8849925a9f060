"""The learner's half of a checkpoint: every rank writes the pieces that it holds, any number of ranks reads them.

    learner-0.safetensors    rank 0's piece of every tensor that training changes, float32:
                             `policy/weights/NAME`, AdamW's `policy/exp_avg/NAME` and `policy/exp_avg_sq/NAME`, the
                             same of `critic`, and `reference/weights/NAME` where the reference is refreshed
    learner-0.json           a ShardIndex: where these pieces lie in the full tensors, and the numbers of the state

What is not here is computed from the configuration and the version: learning rates, orders of mini-batches, frozen
weights. There is no pickle. What several ranks hold alike, copies of the model among it, the first of them writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from asyncrl.checkpoint_folder import flush_file, write_durably
from asyncrl.errors import LearnerError
from asyncrl.learner.mesh import copy_group, is_first_replica
from asyncrl.learner.optimizer import ShardedOptimizer

FORMAT = 1


class Box(msgspec.Struct, frozen=True):
    """A rank's piece of a tensor."""

    shape: tuple[int, ...]
    """Of the full tensor."""
    offset: tuple[int, ...]
    """Where the piece begins, in each dimension."""
    size: tuple[int, ...]


class LearnerState(msgspec.Struct, frozen=True):
    """What the ranks keep between versions besides tensors; the same on every rank."""

    version: int
    kind: dict[str, str]
    """What decides which tensors there are: two learners of one kind can take each other's checkpoint."""
    num_steps: dict[str, dict[str, int]]
    """[part][parameter] -> optimizer steps that its moments have seen."""
    kl_coefficient: float | None = None
    """Of an adaptive KL controller."""


class ShardIndex(msgspec.Struct, frozen=True):
    """A learner-<rank>.json."""

    format: int
    num_shards: int
    """Files of the checkpoint: one a rank that wrote."""
    state: LearnerState
    blake3: str
    """Of the safetensors file."""
    pieces: dict[str, Box]


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors that training changes, and the optimizer that does it, if one does."""

    parameters: Mapping[str, Tensor]
    optimizer: ShardedOptimizer | None


def write_shard(folder: Path, state: LearnerState, parts: Mapping[str, Part], mesh: DeviceMesh) -> None:
    """This rank's two files, on disk when it returns. Raises LearnerError where they cannot be written."""
    if not is_first_replica(mesh):
        return
    pieces = {
        name: piece for name, tensor in _tensors(parts) if (piece := _own_box(tensor, mesh)) is not None
    }
    local = {name: tensor.to_local().detach() for name, tensor in _tensors(parts) if name in pieces}
    file = _shard_file(folder, dist.get_rank())
    try:
        save_file({name: tensor.cpu().contiguous() for name, tensor in local.items()}, file)
        flush_file(file)
        index = ShardIndex(FORMAT, copy_group(mesh).size(), state, _digest(file), pieces)
        write_durably(file.with_suffix(".json"), msgspec.json.encode(index))
    except (OSError, SafetensorError) as error:
        raise LearnerError(
            f"{file} cannot be written ({error}); make room there, or set checkpoint.every: 0"
        ) from error


def read_state(folder: Path, kind: Mapping[str, str]) -> LearnerState:
    """The state in a checkpoint. Raises LearnerError when it is of another kind of learner, or cannot be read."""
    state = _read_index(folder, 0).state
    for key, ours in kind.items():
        if (theirs := state.kind.get(key, "unknown")) != ours:
            raise LearnerError(
                f"{folder} was written with {key}: {theirs}, and this run has {key}: {ours}; resume with the "
                "configuration that it was written with"
            )
    return state


@torch.no_grad()
def read_shards(folder: Path, state: LearnerState, parts: Mapping[str, Part]) -> None:
    """Fills this rank's pieces of all parts, whatever ranks wrote them; each rank verifies its share of the files.

    Raises LearnerError, naming both, for tensors of other names or shapes, and for files that are missing or changed.
    """
    indices = [_read_index(folder, rank) for rank in range(_read_index(folder, 0).num_shards)]
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for number in range(rank, len(indices), num_ranks):
        _verify(_shard_file(folder, number), indices[number].blake3)
    stored = {name: box.shape for index in indices for name, box in index.pieces.items()}
    _check_shapes(folder, stored, {name: tuple(t.shape) for name, t in _tensors(parts)}, "/weights/")
    for name, part in parts.items():
        if part.optimizer is not None:
            part.optimizer.resume_at(state.num_steps[name])
    tensors = dict(_tensors(parts))
    _check_shapes(folder, stored, {name: tuple(t.shape) for name, t in tensors.items()}, "")
    num_missing = {name: tensor.to_local().numel() for name, tensor in tensors.items()}
    for number, index in enumerate(indices):
        with safe_open(_shard_file(folder, number), framework="pt") as file:
            for name, theirs in index.pieces.items():
                num_missing[name] -= _copy(file, name, theirs, tensors[name])
    if incomplete := [name for name, missing in num_missing.items() if missing]:
        raise LearnerError(f"{folder} lacks elements of {incomplete[0]}; resume from another checkpoint")


def _tensors(parts: Mapping[str, Part]) -> Iterator[tuple[str, DTensor]]:
    """(name in the checkpoint, tensor in use) of everything that is kept."""
    for name, part in parts.items():
        kept = {f"weights/{parameter}": tensor for parameter, tensor in part.parameters.items()}
        if part.optimizer is not None:
            kept |= part.optimizer.moments()
        for key, tensor in kept.items():
            assert isinstance(tensor, DTensor)
            yield f"{name}/{key}", tensor


def _box(tensor: DTensor) -> Box:
    size, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(tuple(tensor.shape), tuple(offset), tuple(size))


def _own_box(tensor: DTensor, mesh: DeviceMesh) -> Box | None:
    """What this rank writes: nothing where it has no rows, or another rank has the same ones.

    `mesh`: of all ranks. A tensor may live on a part of it, and is whole along the other dimensions.
    """
    names, own = mesh.mesh_dim_names or (), tensor.device_mesh.mesh_dim_names or ()
    placed = dict(zip(own, tensor.placements, strict=True))
    is_copy = any(
        mesh.get_local_rank(name) and (name not in placed or placed[name].is_replicate()) for name in names
    )
    return None if is_copy or not tensor.to_local().numel() else _box(tensor)


def _copy(file: safe_open, name: str, theirs: Box, tensor: DTensor) -> int:
    """The overlap of a stored piece with this rank's own; returns its number of elements."""
    mine, local = _box(tensor), tensor.to_local()
    there, here, num_elements = [], [], 1
    for o, n, own_o, own_n in zip(theirs.offset, theirs.size, mine.offset, mine.size, strict=True):
        first, last = max(o, own_o), min(o + n, own_o + own_n)
        num_elements *= max(0, last - first)
        there.append(slice(first - o, last - o))
        here.append(slice(first - own_o, last - own_o))
    if num_elements:
        local[tuple(here)].copy_(file.get_slice(name)[tuple(there)])
    return num_elements


def _check_shapes(
    folder: Path, stored: Mapping[str, tuple[int, ...]], ours: Mapping[str, tuple[int, ...]], infix: str
) -> None:
    """Names and shapes of those whose name contains `infix` must agree."""
    for name in sorted(stored.keys() | ours.keys()):
        theirs, mine = stored.get(name), ours.get(name)
        if infix in name and theirs != mine:
            raise LearnerError(
                f"{name} is {list(theirs) if theirs else 'missing'} in {folder} and "
                f"{list(mine) if mine else 'missing'} in this run; resume with the model and the recipe that it was "
                "written with"
            )


def _shard_file(folder: Path, rank: int) -> Path:
    return folder / f"learner-{rank}.safetensors"


def _read_index(folder: Path, rank: int) -> ShardIndex:
    file = _shard_file(folder, rank).with_suffix(".json")
    try:
        index = msgspec.json.decode(file.read_bytes(), type=ShardIndex)
    except (OSError, msgspec.MsgspecError) as error:
        raise LearnerError(f"{file} cannot be read ({error}); resume from another checkpoint") from error
    if index.format != FORMAT:
        raise LearnerError(f"{file} has format {index.format}, and this asyncrl reads {FORMAT}")
    return index


def _digest(file: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()


def _verify(file: Path, expected: str) -> None:
    try:
        found = _digest(file)
    except OSError as error:
        raise LearnerError(f"{file} cannot be read ({error}); resume from another checkpoint") from error
    if found != expected:
        raise LearnerError(
            f"{file} has changed: its blake3 is {found[:16]}... and was {expected[:16]}... when it was written; remove "
            f"{file.parent} to resume from the checkpoint before it"
        )
