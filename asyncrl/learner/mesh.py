"""How the learner's ranks hold the model: one copy in shards (FSDP), or several such copies (HSDP).

    ranks 0 1 2 3, replicas 1:  [0 1 2 3]         every rank has a quarter
                   replicas 2:  [0 1] [2 3]       every rank has a half; gradients are averaged over the copies too

Copies cost memory and save gathering weights across slow links: a replica a node.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def make_mesh(device_type: str, num_ranks: int, replicas: int = 1) -> DeviceMesh:
    """[num_ranks], or [replicas, num_ranks / replicas]; after init_process_group."""
    if replicas == 1:
        return init_device_mesh(device_type, (num_ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(
        device_type, (replicas, num_ranks // replicas), mesh_dim_names=("replicate", "shard")
    )


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The dimension over which a copy is sharded."""
    return mesh if mesh.ndim == 1 else mesh["shard"]


def shard_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks that hold one copy together, this one among them."""
    return shard_mesh(mesh).get_group()


def is_first_replica(mesh: DeviceMesh) -> bool:
    """Whether this rank's copy is the one that is published and exported."""
    return mesh.ndim == 1 or mesh.get_local_rank("replicate") == 0
