"""Norms and feed-forward parts of decoder blocks that keep less for their backward pass than autograd would.

A norm keeps its input and one number a token. A gated feed-forward part (arXiv:2002.05202, SwiGLU) keeps its two inner
products, and computes the activation and the gated product again: a pass over them, and no matrix product. That is two
fifths of what a Llama block keeps, for no measurable time.

A module is recognised by what it computes: where ours gives something else, the model's own stays.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, silu

CHECKED_ROWS = 4


def keep_less(block: nn.Module, *, feed_forward: bool = True) -> None:
    """Replaces the methods `forward` of the norms, and of the feed-forward part, of a block with plain weights on the
    CPU; names of parameters stay Hugging Face's. Gradients stay the same, to rounding."""
    for module in block.modules():
        if isinstance(weight := getattr(module, "weight", None), Tensor) and weight.dim() == 1:
            _replace(module, partial(_norm_forward, module), len(weight))
    mlp: Any = getattr(block, "mlp", None)
    if feed_forward and all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")):
        _replace(mlp, partial(_gated_forward, mlp), mlp.gate_proj.in_features)


@torch.no_grad()
def _replace(module: nn.Module, forward: Any, width: int) -> None:
    x = torch.linspace(-2, 3, CHECKED_ROWS * width).view(1, CHECKED_ROWS, width)
    try:
        is_same = torch.allclose(forward(x), module(x), rtol=1e-4, atol=1e-5)
    except (AttributeError, TypeError, RuntimeError):  # it has other weights, or takes other arguments
        is_same = False
    if is_same:
        module.forward = forward


def _norm_forward(norm: Any, x: Tensor) -> Tensor:
    return _RmsNorm.apply(x, norm.weight, norm.variance_epsilon)


def _gated_forward(mlp: Any, x: Tensor) -> Tensor:
    gate, up, down = mlp.gate_proj(x), mlp.up_proj(x), mlp.down_proj
    # An adapter, or a layer that tensor ranks share, does more than a product with its weight.
    is_plain = type(down) is nn.Linear and not down._forward_hooks and not down._forward_pre_hooks
    if is_plain and down.bias is None:
        return _GatedProduct.apply(gate, up, down.weight)
    return down(silu(gate) * up)


class _RmsNorm(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension (arXiv:1910.07467), the norm in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = torch.linalg.vector_norm(precise, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean_square.add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, scale, weight)
        return weight * (precise * scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, Tensor | None, None]:
        x, scale, weight = ctx.saved_tensors
        normed = x * scale  # float32: the scale is
        grad_normed = grad * weight
        grad_weight = (
            (grad * normed).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        )
        shared = (grad_normed * normed).mean(-1, keepdim=True)
        grad_x = (grad_normed - normed.mul_(shared)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


class _GatedProduct(torch.autograd.Function):
    """(silu(gate) * up) @ weight.T; gate and up [..., I], weight [H, I]."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return linear(silu(gate).mul_(up), weight)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        gate, up, weight = ctx.saved_tensors
        grad_product = grad @ weight
        activation = silu(gate)
        grad_up = grad_product * activation
        grad_gate = torch.ops.aten.silu_backward(grad_product.mul_(up), gate)
        grad_weight = None
        if ctx.needs_input_grad[2]:
            grad_weight = grad.flatten(0, -2).T @ activation.mul_(up).flatten(0, -2)
        return grad_gate, grad_up, grad_weight
