"""How the learner's ranks hold the model: in shards (FSDP), in several copies (HSDP), layers cut across ranks (tensor).

    ranks 0 1 2 3, one copy:        [0 1 2 3]          every rank has a quarter of the rows of every tensor
                   replicas 2:      [0 1] [2 3]        every rank has a half; gradients are averaged over the copies too
                   tensor 2:        [(0 1) (2 3)]      0 and 1 compute halves of the same layers on the same tokens,
                                                       2 and 3 on others; each of the four has a quarter

Copies cost memory and save gathering weights across slow links: a replica a node. The ranks of a tensor group exchange
activations in every layer, so they are neighbours: on one node, on fast links.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"
"""Dimensions of the mesh, outermost first; `replicate` and `tensor` only where they are larger than 1."""


def make_mesh(
    device_type: str, num_ranks: int, replicas: int = 1, tensor_parallel_size: int = 1
) -> DeviceMesh:
    """[replicas?, num_ranks / replicas / tensor_parallel_size, tensor_parallel_size?]; after init_process_group."""
    num_shards = num_ranks // (replicas * tensor_parallel_size)
    sizes = {REPLICATE: replicas, SHARD: num_shards, TENSOR: tensor_parallel_size}
    sizes = {name: size for name, size in sizes.items() if name == SHARD or size > 1}
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """[replicate?, shard]: the ranks with data of their own, over which FSDP works."""
    names = tuple(name for name in dim_names(mesh) if name != TENSOR)
    return mesh if len(names) == mesh.ndim else mesh[names]


def tensor_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The ranks that compute parts of the same layers on the same data, this one among them; None: it is alone."""
    return mesh[TENSOR] if TENSOR in dim_names(mesh) else None


def num_data_ranks(mesh: DeviceMesh) -> int:
    """Ranks with data of their own."""
    return data_mesh(mesh).size()


def data_rank(mesh: DeviceMesh) -> int:
    """Whose share of a plan this rank trains: all ranks of a tensor group the same."""
    tensor = tensor_mesh(mesh)
    return dist.get_rank() // (1 if tensor is None else tensor.size())


def data_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """One rank of every data rank, this one among them: what it sums, counts each token once."""
    return _group(mesh, (REPLICATE, SHARD))


def copy_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks that hold one copy together, this one among them."""
    return _group(mesh, (SHARD, TENSOR))


def is_first_replica(mesh: DeviceMesh) -> bool:
    """Whether this rank's copy is the one that is published and exported."""
    return REPLICATE not in dim_names(mesh) or mesh.get_local_rank(REPLICATE) == 0


def dim_names(mesh: DeviceMesh) -> tuple[str, ...]:
    names = mesh.mesh_dim_names
    assert names is not None, "make_mesh names every dimension"
    return names


def _group(mesh: DeviceMesh, names: tuple[str, ...]) -> dist.ProcessGroup:
    """Over those of the dimensions that the mesh has. Collective when it is called first."""
    present = tuple(name for name in names if name in dim_names(mesh))
    if len(present) == mesh.ndim:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    return mesh[present].get_group() if len(present) == 1 else mesh[present]._flatten().get_group()
