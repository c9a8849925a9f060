"""Importance weights between the policy that sampled and the one that the loss is about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.correction.statistics import cut
from asyncrl.algorithms.segments import Segments
from asyncrl.config.corrections import ImportanceWeight

AllReduce = Callable[[Tensor], Tensor]
"""A tensor of this rank -> its sum over the ranks that share the batch."""


@dataclass(slots=True, frozen=True)
class Weights:
    """[N] each."""

    ratio: Tensor
    """At the weight's level, before its bounds."""
    bounded: Tensor
    """Within the bounds: what multiplies the loss, but for the normaliser."""
    normaliser: Tensor
    """Scalar: the batch's mean of `bounded`, 1 without batch normalisation or for weights that are all 0."""


def bounded_weights(
    log_ratio: Tensor,
    among: Tensor,
    segments: Segments,
    config: ImportanceWeight,
    *,
    max_log_ratio: float | None,
    all_reduce: AllReduce,
) -> Weights:
    """log_ratio [N], among [N] bool: the tokens that sums over a trajectory take in.

    Truncated importance sampling: fengyao.notion.site/off-policy-rl. IcePop (arXiv:2510.18855) zeroes instead.
    """
    log_ratio = cut(log_ratio, max_log_ratio)
    if config.level != "token":
        kept = Segments(segments.index[among], segments.num_trajectories)
        aggregate = kept.sum if config.level == "sequence" else kept.mean
        log_ratio = segments.spread(cut(aggregate(log_ratio[among]), max_log_ratio))
    ratio = log_ratio.exp()
    if config.outside == "truncate":
        bounded = cut_to_bounds(ratio, config.lower, config.upper)
    else:
        bounded = torch.where(is_below(ratio, config.lower) | is_above(ratio, config.upper), 0.0, ratio)
    normaliser = ratio.new_ones(())
    if config.batch_normalize:
        normaliser = _batch_mean(bounded, segments, config, all_reduce)
    return Weights(ratio, bounded, normaliser)


def cut_to_bounds(values: Tensor, lower: float | None, upper: float | None) -> Tensor:
    return values if lower is None and upper is None else values.clamp(lower, upper)


def is_below(values: Tensor, lower: float | None) -> Tensor:
    """False for a NaN, which stays in the loss, for the gradient norm to refuse."""
    return torch.zeros_like(values, dtype=torch.bool) if lower is None else values < lower


def is_above(values: Tensor, upper: float | None) -> Tensor:
    """False for a NaN, which stays in the loss, for the gradient norm to refuse."""
    return torch.zeros_like(values, dtype=torch.bool) if upper is None else values > upper


def _batch_mean(
    weights: Tensor, segments: Segments, config: ImportanceWeight, all_reduce: AllReduce
) -> Tensor:
    """Scalar: the mean over tokens, or over the trajectories that have tokens; 1 if that is 0."""
    if config.level == "token":
        total, count = weights.sum(), weights.new_tensor(len(weights))
    else:
        total, count = segments.mean(weights).sum(), (segments.counts() > 0).sum()
    total, count = all_reduce(torch.stack([total.double(), count.double()]))
    return torch.where(total > 0, total / count.clamp(min=1), 1.0).to(weights.dtype)
