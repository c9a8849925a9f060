"""Attention over packed groups: the prompt once, then its completions, each seeing the prompt and itself.

A packed row holds groups end to end. Transformers calls `group_attention` in every decoder layer under the
name ATTENTION_NAME; the GroupLayout travels to it through the model's keyword arguments. Since transformers
knows no mask function of that name, it builds no mask. Linear layers see the packed tokens only; padding
exists inside the attention of one group, between completions of different lengths. On a GPU that has the kernel
(varlen_attention.py) there is none at all, and one call a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from asyncrl.errors import LearnerError
from asyncrl.learner.varlen_attention import VarlenLayout, attend_varlen, has_varlen_kernel

ATTENTION_NAME = "asyncrl_group"


MAX_PADDED_SHARE = {"cpu": 1.1, "cuda": 1.5}
"""Completions share one attention call while its padded slots are at most so many times their tokens. A call more costs
little on a CPU; a GPU likes few and large ones."""


class CompletionBucket:
    """Completions of a group of about equal length, which attend together: `num_completions` rows of `length` slots."""

    def __init__(self, prompt_length: int, num_completions: int, length: int) -> None:
        self.prompt_length = prompt_length
        self.num_completions = num_completions
        self.length = length
        self._masks: dict[tuple[int, torch.dtype], Tensor] = {}

    @property
    def num_slots(self) -> int:
        return self.num_completions * self.length

    def mask(self, repeats: int, like: Tensor) -> Tensor:
        """[repeats * length, prompt_length + length] to add to scores: 0, or -inf where a key comes after the query.
        Every layer asks for the same one. Slots past a completion's end need no mask of their own: they lie after every
        real query of their row."""
        key = (repeats, like.dtype)
        if key not in self._masks:
            width = self.prompt_length + self.length
            hidden = torch.full((self.length, width), -torch.inf, dtype=like.dtype, device=like.device)
            self._masks[key] = hidden.triu(self.prompt_length + 1).repeat(repeats, 1)
        return self._masks[key]


@dataclass(slots=True, frozen=True)
class PaddedLayout:
    """The row's T tokens laid out in slots: each group's prompt, then its completions in buckets."""

    buckets: tuple[tuple[CompletionBucket, ...], ...]
    """Of each group."""
    piece_slots: list[int]
    """Slots of prompt, bucket, bucket, ..., prompt, bucket, ..."""
    token_of_slot: Tensor
    """[slots] int64; slots past a completion's end repeat its last token."""
    slot_of_token: Tensor
    """[T] int64"""
    padding: Tensor
    """[slots - T] int64: the slots past the end of a completion."""

    @classmethod
    def of(cls, groups: Sequence[tuple[int, Sequence[int]]], device: torch.device) -> PaddedLayout:
        """Of groups given as (prompt length, lengths of the completions that have tokens), in the row's order."""
        buckets: list[tuple[CompletionBucket, ...]] = []
        tokens: list[Tensor] = []
        is_padding: list[Tensor] = []
        start = 0
        for prompt_length, lengths in groups:
            tokens.append(torch.arange(start, start + prompt_length))
            is_padding.append(torch.zeros(prompt_length, dtype=torch.bool))
            start += prompt_length
            first = torch.tensor([0, *lengths]).cumsum(0) + start
            of_group = []
            for members in bucket_by_length(lengths, MAX_PADDED_SHARE[device.type]):
                length = torch.tensor([lengths[i] for i in members])[:, None]  # [C, 1]
                slot = torch.arange(int(length.max()))[None, :]  # [1, L]
                tokens.append((first[members][:, None] + slot.minimum(length - 1)).flatten())
                is_padding.append((slot >= length).flatten())
                of_group.append(CompletionBucket(prompt_length, len(members), slot.shape[1]))
            buckets.append(tuple(of_group))
            start += sum(lengths)
        token_of_slot, padding = torch.cat(tokens), torch.cat(is_padding)
        slot_of_token = torch.where(padding, start, token_of_slot).argsort(stable=True)[:start]
        return cls(
            tuple(buckets),
            [len(piece) for piece in tokens],
            token_of_slot.to(device),
            slot_of_token.to(device),
            padding.nonzero()[:, 0].to(device),
        )


class GroupLayout:
    """The groups of one packed row, in order. Attention reads one of the two forms, made when it is first read."""

    def __init__(self, groups: Sequence[tuple[int, Sequence[int]]], device: torch.device) -> None:
        """`groups`: (prompt length, lengths of the completions that have tokens) of each."""
        self._groups = [(prompt_length, list(lengths)) for prompt_length, lengths in groups]
        self._device = device

    @cached_property
    def padded(self) -> PaddedLayout:
        return PaddedLayout.of(self._groups, self._device)

    @cached_property
    def varlen(self) -> VarlenLayout:
        return VarlenLayout.of(self._groups, self._device)


def bucket_by_length(lengths: Sequence[int], max_padded_share: float) -> list[list[int]]:
    """Indices of completions, longest first, in buckets whose padded slots are at most `max_padded_share` times their
    tokens; within a bucket in their order."""
    buckets: list[list[int]] = []
    tokens = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if buckets:
            slots = (len(buckets[-1]) + 1) * lengths[buckets[-1][0]]
            if slots <= max_padded_share * (tokens + lengths[i]):
                buckets[-1].append(i)
                tokens += lengths[i]
                continue
        buckets.append([i])
        tokens = lengths[i]
    return [sorted(bucket) for bucket in buckets]


def group_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    group_layout: GroupLayout | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Exact attention of every token over its prompt and its own completion. The signature is transformers'.

    query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D]. Raises LearnerError for a model whose
    attention needs more than that.
    """
    unsupported = {
        "attention_mask": attention_mask,
        "sliding_window": sliding_window,
        "dropout": dropout or None,
    }
    unsupported |= {name: kwargs.get(name) for name in ("softcap", "s_aux", "position_bias")}
    if used := sorted(name for name, argument in unsupported.items() if argument is not None):
        raise LearnerError(
            f"{type(module).__name__} asks for {', '.join(used)}, which packed groups do not support; "
            "use a model with plain causal attention"
        )
    if group_layout is None:
        raise LearnerError(
            f"{type(module).__name__} was called without a group layout: this model does not hand its keyword "
            "arguments down to the attention; use a model of another architecture (Llama, Qwen2, Qwen3)"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if has_varlen_kernel(query):
        return attend_varlen(q, k, v, group_layout.varlen, scaling).unsqueeze(0), None
    return attend_padded(q, k, v, group_layout.padded, scaling).unsqueeze(0), None


def attend_padded(query: Tensor, key: Tensor, value: Tensor, layout: PaddedLayout, scaling: float) -> Tensor:
    """Query [T, H, D], key and value [T, H_kv, D] of the row -> [T, H, D]; any device and dtype."""
    pieces = [_Spread.apply(x, layout).split(layout.piece_slots) for x in (query, key, value)]
    piece = zip(*pieces, strict=True)
    outputs: list[Tensor] = []
    for buckets in layout.buckets:
        query, prompt_key, prompt_value = next(piece)
        outputs.append(_attend_prompt(query, prompt_key, prompt_value, scaling))
        for bucket in buckets:
            query, key, value = (x.unflatten(0, (bucket.num_completions, -1)) for x in next(piece))
            out = _attend_completions(query, prompt_key, key, prompt_value, value, bucket, scaling)
            outputs.append(out.flatten(0, 1))
    return _Collect.apply(torch.cat(outputs), layout)


class _Spread(torch.autograd.Function):
    """x [T, ...] in slots. Of slots past a completion's end the gradient is not read: it is exactly 0, since no query
    of the row sees them and their own outputs are dropped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: PaddedLayout) -> Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.token_of_slot)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.layout.slot_of_token), None


class _Collect(torch.autograd.Function):
    """The tokens [T, ...] of slots."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: PaddedLayout) -> Tensor:
        ctx.layout = layout
        return x.index_select(0, layout.slot_of_token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        layout = ctx.layout
        return grads[0].index_select(0, layout.token_of_slot).index_fill_(0, layout.padding, 0.0), None


def _attend_prompt(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """[P, H, D] each -> [P, H, D]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return out[0].transpose(0, 1)


def _attend_completions(
    query: Tensor,
    prompt_key: Tensor,
    key: Tensor,
    prompt_value: Tensor,
    value: Tensor,
    bucket: CompletionBucket,
    scaling: float,
) -> Tensor:
    """Query [C, L, H, D]; prompt [P, H_kv, D]; own key and value [C, L, H_kv, D] -> [C, L, H, D]."""
    num_completions, length, num_heads, _ = query.shape
    num_kv_heads = key.shape[2]
    # The query heads that share a key head become more rows of one query: no copy of keys a query head.
    q = query.view(num_completions, length, num_kv_heads, -1, query.shape[-1])
    q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [C, H_kv, H / H_kv * L, D]
    k, v = (
        torch.cat([prompt.expand(num_completions, -1, -1, -1), own], dim=1).transpose(1, 2)
        for prompt, own in ((prompt_key, key), (prompt_value, value))
    )  # [C, H_kv, P + L, D]
    mask = bucket.mask(num_heads // num_kv_heads, like=q)
    out = scaled_dot_product_attention(q, k, v, mask, scale=scaling)
    out = out.unflatten(2, (-1, length)).permute(0, 3, 1, 2, 4)  # [C, L, H_kv, H / H_kv, D]
    return out.flatten(2, 3)


AttentionInterface.register(ATTENTION_NAME, group_attention)
