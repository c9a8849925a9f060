"""Tensor parallelism: each rank of a tensor group computes its heads and its columns of the same layers.

The transformers model says how it is cut: `base_model_tp_plan` of its configuration names a style for each module of
the decoder. torch's own styles cut the matrices; FSDP2 then shards what a rank has left by rows.

    colwise     rows of the weight (its outputs)     q, k, v, gate, up
    rowwise     columns of the weight (its inputs)   o, down; outputs are summed over the group
    replicated_with_grad_allreduce                   a norm of each head: whole, but it sees this rank's heads only
    not named                                        whole, on whole activations: embedding, head, other norms

The optimizer averages the gradients of whole parameters over the group once a step, so that they stay the same bits on
all its ranks. Where a rank applies one to its share only, of heads or of tokens, gradients inside are `size` times as
large: the average is then the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from asyncrl.errors import LearnerError
from asyncrl.learner.mesh import SHARD, TENSOR, dim_names

CUTS = ("colwise", "rowwise")
PLAN = "base_model_tp_plan"
EMBEDDING = "embed_tokens"
"""Stays whole: a tied head reads it too, for this rank's share of the tokens."""


class OnShareOfHeads(ParallelStyle):
    """A module that every rank has whole and applies to its own heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        size = device_mesh.size()

        def enter(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return scale_gradient(inputs[0], 1 / size), *inputs[1:]

        def leave(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return scale_gradient(output, size)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "replicated_with_grad_allreduce": OnShareOfHeads,
}


def parallelize(decoder: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts the layers of a transformers decoder over the ranks of `mesh` by its own plan, before FSDP.

    Every rank holds the whole decoder and keeps its part. Raises LearnerError for a model without a plan, or with one
    that cannot be followed.
    """
    styles = {pattern: STYLES[style]() for pattern, style in plan_for(decoder, mesh.size()).items()}
    parallelize_module(decoder, mesh, styles, src_data_rank=None)


def plan_for(decoder: nn.Module, size: int) -> dict[str, str]:
    """Pattern of module names, such as layers.*.mlp.up_proj -> style, for `size` ranks. Raises LearnerError."""
    config: Any = decoder.config
    plan: dict[str, str] = dict(getattr(config, PLAN, None) or {})
    plan.pop(EMBEDDING, None)
    if not plan:
        raise LearnerError(
            f"{config.model_type} has no plan for tensor parallelism ({PLAN} of its transformers configuration); set "
            "learner.tensor_parallel_size: 1"
        )
    for pattern, style in plan.items():
        if style not in STYLES:
            raise LearnerError(
                f"{config.model_type}'s plan for tensor parallelism asks for {style!r} of {pattern}; asyncrl knows "
                f"{', '.join(STYLES)}; set learner.tensor_parallel_size: 1"
            )
    _check_modules(decoder, plan, size)
    return plan


def _check_modules(decoder: nn.Module, plan: dict[str, str], size: int) -> None:
    """What is cut can be cut evenly, and nothing beside it sees a part without the plan saying so."""
    config: Any = decoder.config
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, key, None)) is not None and heads % size:
            raise LearnerError(
                f"learner.tensor_parallel_size {size} does not divide the model's {key} {heads}"
            )
    styles = {name: _style_of(name, plan) for name, _ in decoder.named_modules()}
    cut = [name for name, style in styles.items() if style in CUTS]
    for parent in sorted({name.rpartition(".")[0] for name in cut}):
        for name, parameter in decoder.get_submodule(parent).named_parameters(parent):
            if styles[name.rpartition(".")[0]] is None:
                raise LearnerError(
                    f"{config.model_type}'s plan for tensor parallelism cuts {parent} and does not name its {name} "
                    f"{[*parameter.shape]}, so its gradient would be of a part; set learner.tensor_parallel_size: 1"
                )
    for name in cut:
        module, style = decoder.get_submodule(name), styles[name]
        if not isinstance(module, nn.Linear):
            raise LearnerError(
                f"{config.model_type}'s plan cuts {name}, a {type(module).__name__}; only linear layers can be cut; "
                "set learner.tensor_parallel_size: 1"
            )
        width = module.out_features if style == "colwise" else module.in_features
        if width % size:
            raise LearnerError(f"learner.tensor_parallel_size {size} does not divide {name}'s width {width}")


def _style_of(name: str, plan: dict[str, str]) -> str | None:
    return next((style for pattern, style in plan.items() if fnmatch(name, pattern)), None)


def is_whole(parameter: Tensor) -> bool:
    """Whether every rank of a tensor group has the same values of it."""
    assert isinstance(parameter, DTensor)
    names = dim_names(parameter.device_mesh)
    return TENSOR not in names or parameter.placements[names.index(TENSOR)].is_replicate()


def owned_rows(parameter: DTensor, tensor: DeviceMesh | None) -> tuple[Tensor, int]:
    """(rows of the full tensor that this rank answers for, number of the first).

    The ranks of a copy own every row once: of what they hold in columns, or whole, those of the first tensor rank. The
    parameter's own storage but for columns, which are gathered. Collective over the tensor group.
    """
    mesh, local = parameter.device_mesh, parameter.to_local().detach()
    tensor_rank, size = (0, 1) if tensor is None else (tensor.get_local_rank(), tensor.size())
    num_rows, first = parameter.shape[0], 0
    if not is_whole(parameter):
        placement = parameter.placements[dim_names(mesh).index(TENSOR)]
        assert isinstance(placement, Shard)
        if placement.dim == 0:
            num_rows //= size
            first, tensor_rank = tensor_rank * num_rows, 0
        else:
            assert tensor is not None
            pieces = [torch.empty_like(local) for _ in range(size)]
            dist.all_gather(pieces, local.contiguous(), group=tensor.get_group())
            local = torch.cat(pieces, placement.dim)
    first += min(-(-num_rows // mesh[SHARD].size()) * mesh.get_local_rank(SHARD), num_rows)
    return (local if tensor_rank == 0 else local[:0]), first


def take_share(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """[N, ...], the same on every rank -> this rank's share of the rows; the last ranks may have fewer, or none.

    Backward, every rank gets the whole gradient.
    """
    share: Tensor = _TakeShare.apply(whole, mesh)
    return scale_gradient(share, 1 / mesh.size())


def join_shares(share: Tensor, mesh: DeviceMesh, num_rows: int) -> Tensor:
    """The shares of `num_rows` rows -> [num_rows, ...], the same on every rank, as is the gradient that comes back."""
    whole: Tensor = _JoinShares.apply(scale_gradient(share, mesh.size()), mesh, num_rows)
    return whole


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """x; its gradient is `factor` times what comes back."""
    scaled: Tensor = _ScaleGradient.apply(x, factor)
    return scaled


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.factor, None


class _TakeShare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh, ctx.num_rows = mesh, len(whole)
        return whole[_share(len(whole), mesh)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(grads[0], ctx.mesh, ctx.num_rows), None


class _JoinShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, mesh: DeviceMesh, num_rows: int) -> Tensor:
        ctx.mesh = mesh
        return _gather(share, mesh, num_rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0][_share(len(grads[0]), ctx.mesh)], None, None


def _share(num_rows: int, mesh: DeviceMesh) -> slice:
    each = -(-num_rows // mesh.size())
    first = min(each * mesh.get_local_rank(), num_rows)
    return slice(first, min(first + each, num_rows))


def _gather(share: Tensor, mesh: DeviceMesh, num_rows: int) -> Tensor:
    """Collective, but for no rows: then there is nothing to send on any rank."""
    each = -(-num_rows // mesh.size())
    if not each:
        return share
    padded = share.new_zeros(each, *share.shape[1:])
    padded[: len(share)] = share
    pieces = [torch.empty_like(padded) for _ in range(mesh.size())]
    dist.all_gather(pieces, padded, group=mesh.get_group())
    return torch.cat(pieces)[:num_rows]
