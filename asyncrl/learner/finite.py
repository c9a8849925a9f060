"""Finds NaN and Inf in sharded tensors, on all ranks at once. Used for gradients and before publishing weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def shard_norms(shards: Sequence[Tensor]) -> Tensor:
    """[len(shards)] Euclidean norm of each, float64; not finite where a shard has NaN or Inf. Empty shards: 0.

    On the device of the shards: a host's, where they are offloaded.
    """
    return torch.stack([torch.linalg.vector_norm(shard) for shard in shards]).double()


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Where tensors must be that the group's collectives take."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def first_non_finite(norms: Tensor, group: dist.ProcessGroup) -> int | None:
    """The lowest index whose norm is not finite on any rank; the same answer on every rank. Collective."""
    norms = norms.to(group_device(group))
    bad = (~norms.isfinite()).nonzero()
    first = bad[:1].flatten() if len(bad) else torch.tensor([len(norms)], device=norms.device)
    dist.all_reduce(first, dist.ReduceOp.MIN, group=group)
    index = int(first)
    return index if index < len(norms) else None
