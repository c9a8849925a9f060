"""y_t = x_t + decay_t * y_(t+1) along each trajectory, without a loop over tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asyncrl.algorithms.segments import Segments

Gaps = Literal["carry", "discount", "cut"]
"""What tokens that do not train (observations) do to what comes after them. `carry`: nothing, they are not there.
`discount`: each costs one factor of gamma (and of lambda). `cut`: nothing passes them."""


def backward_recurrence(values: Tensor, decays: Tensor, segments: Segments) -> Tensor:
    """y_t = values_t + decays_t * y_(t+1) within each trajectory; values, decays [N] -> [N].

    decays_t belongs to the step from t to its successor; the last token's is not read. Log-depth: the partial
    sums over 2^k tokens are joined in k steps, O(N log of the longest trajectory). Each trajectory's result
    is bitwise the same whatever else is in the batch, and no inf or NaN of another can reach it.
    """
    num_tokens = len(values)
    longest = int(segments.counts().max()) if num_tokens else 0
    distance = 1
    while distance < longest:
        inside = segments.index[:-distance] == segments.index[distance:]
        joined = values[:-distance] + decays[:-distance] * values[distance:]
        reach = decays[:-distance] * decays[distance:]
        values = torch.cat([torch.where(inside, joined, values[:-distance]), values[num_tokens - distance :]])
        decays = torch.cat([torch.where(inside, reach, decays[:-distance]), decays[num_tokens - distance :]])
        distance *= 2
    return values


def next_in_trajectory(values: Tensor, segments: Segments, last: Tensor | None = None) -> Tensor:
    """values [N] -> [N]: the value at the next token; at the last one `last` [R], by default 0."""
    following = values.roll(-1)
    at_end = is_last(segments)
    ends = torch.zeros_like(values) if last is None else segments.spread(last.to(values.dtype))
    return torch.where(at_end, ends, following)


def is_last(segments: Segments) -> Tensor:
    """[N] bool: the last trained token of its trajectory."""
    at_end = torch.ones_like(segments.index, dtype=torch.bool)
    at_end[:-1] = segments.index[:-1] != segments.index[1:]
    return at_end


def passing(
    decay: float | Tensor, segments: Segments, gaps: Gaps, positions: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """[N]: what is left of a value after the untrained tokens between its token and the one before it.

    decay: a number or [N], for each untrained token under `discount`. 1 everywhere under `carry`; 0 at an
    observation under `cut`. positions [N] int64: each token's place in its trajectory, observations counted.
    """
    if gaps == "carry":
        return torch.ones(len(segments.index), dtype=dtype, device=segments.index.device)
    if positions is None:
        raise ValueError(f"gaps={gaps!r} needs the positions of the tokens")
    between = torch.where(is_last(segments), 0, positions.roll(-1) - positions - 1)
    if gaps == "cut":
        return (between == 0).to(dtype)
    return torch.as_tensor(decay, dtype=dtype, device=between.device).pow(between)
