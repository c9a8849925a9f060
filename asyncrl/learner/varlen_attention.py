"""Attention over packed groups on a GPU: one call of torch's varlen kernel (FlashAttention) a layer, no padding.

Every prompt and every completion is a sequence of queries. A prompt's keys are its own; a completion's are those of
its prompt and then its own:

    row        p p p a a b b b                prompt p, completions a and b
    queries    [p p p] [a a] [b b b]          the row as it is
    keys       [p p p] [p p p a a] [p p p b b b]

The kernel aligns the causal mask of a sequence to its last query and last key, so that a completion's first token sees
its whole prompt and itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

HALF = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
"""Of the kernel; it takes multiples of 8 up to it."""


@dataclass(slots=True, frozen=True)
class VarlenLayout:
    """S sequences of a row of T tokens, with T_k keys."""

    query_starts: Tensor
    """[S + 1] int32"""
    key_starts: Tensor
    """[S + 1] int32"""
    max_queries: int
    max_keys: int
    key_index: Tensor
    """[T_k] int64: the packed position of each key."""

    @classmethod
    def of(cls, groups: Sequence[tuple[int, Sequence[int]]], device: torch.device) -> VarlenLayout:
        """Of groups given as (prompt length, lengths of the completions that have tokens), in the row's order."""
        num_queries, num_keys, index, start = [], [], [], 0
        for prompt_length, lengths in groups:
            prompt = torch.arange(start, start + prompt_length)
            num_queries.append(prompt_length)
            num_keys.append(prompt_length)
            index.append(prompt)
            start += prompt_length
            for length in lengths:
                num_queries.append(length)
                num_keys.append(prompt_length + length)
                index += [prompt, torch.arange(start, start + length)]
                start += length
        return cls(
            _starts(num_queries, device),
            _starts(num_keys, device),
            max(num_queries),
            max(num_keys),
            torch.cat(index).to(device),
        )


def _starts(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)


def has_varlen_kernel(query: Tensor) -> bool:
    """Whether the kernel takes queries [..., D] of this device and dtype."""
    head_dim = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in HALF
        and head_dim % 8 == 0
        and head_dim <= MAX_HEAD_DIM
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def attend_varlen(query: Tensor, key: Tensor, value: Tensor, layout: VarlenLayout, scaling: float) -> Tensor:
    """Query [T, H, D], key and value [T, H_kv, D] of the row -> [T, H, D]."""
    out = varlen_attn(
        query,
        _TakeRows.apply(key, layout.key_index),
        _TakeRows.apply(value, layout.key_index),
        layout.query_starts,
        layout.key_starts,
        layout.max_queries,
        layout.max_keys,
        window_size=(-1, 0),
        scale=scaling,
        enable_gqa=True,
    )
    assert isinstance(out, Tensor)  # no log-sum-exp was asked for
    return out


class _TakeRows(torch.autograd.Function):
    """x[index], whose gradient is summed in float32: the prompt's keys have one share a completion, and bfloat16 would
    round after each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        grad = grads[0]
        precise = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(ctx.num_rows, *grad.shape[1:], dtype=precise)
        return total.index_add_(0, index, grad.to(precise)).to(grad.dtype), None
