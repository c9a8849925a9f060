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


@dataclass(slots=True, frozen=True)
class CompletionBucket:
    """Completions of a group of about equal length, which attend together."""

    num_completions: int
    padded_index: Tensor | None
    """[C * L] position, among the group's packed completion tokens, of each padded slot (L is the longest
    length). Slots past a completion's end repeat its last token. None for all of a group, of one length."""


@dataclass(slots=True, frozen=True)
class GroupSpan:
    """Where one group lies in the packed row: `prompt_length` tokens, then its completions end to end."""

    prompt_length: int
    num_completion_tokens: int
    buckets: tuple[CompletionBucket, ...]
    packed_index: Tensor | None
    """[sum of lengths] the slot of each packed completion token, among those of all buckets end to end. None where
    they are in order already."""


class GroupLayout:
    """The groups of one packed row, in order. Each layer reads one of the two forms, made when it is first read."""

    def __init__(self, groups: Sequence[tuple[int, Sequence[int]]], device: torch.device) -> None:
        """`groups`: (prompt length, lengths of the completions that have tokens) of each."""
        self._groups = [(prompt_length, list(lengths)) for prompt_length, lengths in groups]
        self._device = device

    @cached_property
    def spans(self) -> tuple[GroupSpan, ...]:
        """For padded attention, a group at a time."""
        return tuple(_span(prompt_length, lengths, self._device) for prompt_length, lengths in self._groups)

    @property
    def piece_lengths(self) -> list[int]:
        """The row cut into prompt, completions, prompt, completions, ..."""
        return [length for prompt_length, lengths in self._groups for length in (prompt_length, sum(lengths))]

    @cached_property
    def varlen(self) -> VarlenLayout:
        """For attention without padding."""
        return VarlenLayout.of(self._groups, self._device)


def _span(prompt_length: int, lengths: list[int], device: torch.device) -> GroupSpan:
    total = sum(lengths)
    if len(set(lengths)) < 2:
        bucket = CompletionBucket(len(lengths), None)
        return GroupSpan(prompt_length, total, (bucket,) if lengths else (), None)
    start = torch.tensor([0, *lengths]).cumsum(0)
    buckets, order = [], []
    for members in bucket_by_length(lengths, MAX_PADDED_SHARE[device.type]):
        length = torch.tensor([lengths[i] for i in members])[:, None]  # [C, 1]
        slot = torch.arange(int(length.max()))[None, :]  # [1, L]
        padded_index = (start[members][:, None] + slot.minimum(length - 1)).flatten()
        order.append(torch.where(slot < length, padded_index.view(len(members), -1), total).flatten())
        buckets.append(CompletionBucket(len(members), padded_index.to(device)))
    packed_index = torch.cat(order).argsort(stable=True)[:total]  # padding sorts behind every token
    return GroupSpan(prompt_length, total, tuple(buckets), packed_index.to(device))


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
    return attend_padded(q, k, v, group_layout, scaling).unsqueeze(0), None


def attend_padded(query: Tensor, key: Tensor, value: Tensor, layout: GroupLayout, scaling: float) -> Tensor:
    """Query [T, H, D], key and value [T, H_kv, D] of the row -> [T, H, D]; any device and dtype."""
    queries, keys, values = (x.split(layout.piece_lengths) for x in (query, key, value))
    pieces: list[Tensor] = []
    for i, span in enumerate(layout.spans):
        prompt = 2 * i
        pieces.append(_attend_prompt(queries[prompt], keys[prompt], values[prompt], scaling))
        outputs: list[Tensor] = []
        for bucket in span.buckets:
            q, k, v = (_pad(x[prompt + 1], bucket) for x in (queries, keys, values))
            out = _attend_completions(q, keys[prompt], k, values[prompt], v, scaling)
            outputs.append(out.flatten(0, 1))
        if span.packed_index is not None:
            outputs = [torch.cat(outputs).index_select(0, span.packed_index)]
        pieces += outputs
    return torch.cat(pieces)


def _pad(x: Tensor, bucket: CompletionBucket) -> Tensor:
    """[sum of lengths, H, D] of the group -> [C, L, H, D] of the bucket."""
    if bucket.padded_index is not None:
        x = x.index_select(0, bucket.padded_index)
    return x.unflatten(0, (bucket.num_completions, -1))


def _attend_prompt(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """[P, H, D] each -> [P, H, D]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return out[0].transpose(0, 1)


def _attend_completions(
    query: Tensor, prompt_key: Tensor, key: Tensor, prompt_value: Tensor, value: Tensor, scaling: float
) -> Tensor:
    """Query [C, L, H, D]; prompt [P, H_kv, D]; own key and value [C, L, H_kv, D] -> [C, L, H, D].

    Slots past a completion's end need no mask of their own: they lie after every real query of their row, so
    the causal mask hides them, and their outputs are dropped, so their gradients are exactly 0.
    """
    num_completions, length, num_heads, _ = query.shape
    num_kv_heads = key.shape[2]
    mask = torch.ones(length, len(prompt_key) + length, dtype=torch.bool, device=query.device)
    mask = mask.tril(len(prompt_key))
    # The query heads that share a key head become more rows of one query: no copy of keys a query head.
    q = query.view(num_completions, length, num_kv_heads, -1, query.shape[-1])
    q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [C, H_kv, H / H_kv * L, D]
    k, v = (
        torch.cat([prompt.expand(num_completions, -1, -1, -1), own], dim=1).transpose(1, 2)
        for prompt, own in ((prompt_key, key), (prompt_value, value))
    )  # [C, H_kv, P + L, D]
    out = scaled_dot_product_attention(q, k, v, mask.repeat(num_heads // num_kv_heads, 1), scale=scaling)
    out = out.unflatten(2, (-1, length)).permute(0, 3, 1, 2, 4)  # [C, L, H_kv, H / H_kv, D]
    return out.flatten(2, 3)


AttentionInterface.register(ATTENTION_NAME, group_attention)
