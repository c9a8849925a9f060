"""What criteria and diagnostics measure of a token's log ratio, and how it is aggregated over a trajectory."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.segments import Segments


def cut(log_ratio: Tensor, max_log_ratio: float | None) -> Tensor:
    """log_ratio [...] within +-max_log_ratio; NaN stays NaN."""
    return log_ratio if max_log_ratio is None else log_ratio.clamp(-max_log_ratio, max_log_ratio)


def token_statistic(name: str, new: Tensor, old: Tensor, *, max_log_ratio: float | None) -> Tensor:
    """[N] of log-probs [N] of two policies: BoundsRejection.statistic. `ratio` is in nats, that is log r.

    k1, k2, k3 are estimates of KL(old || new) from samples of old (joschu.net/blog/kl-approx).
    """
    log_ratio = cut(new - old, max_log_ratio)
    match name:
        case "ratio":
            return log_ratio
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            return log_ratio.expm1() - log_ratio
        case "reverse_k3":
            return (-log_ratio).expm1() + log_ratio
        case "ratio_deviation":
            return log_ratio.expm1().abs()
        case "multiplicative_error":
            return log_ratio.abs().exp()
        case "probability_difference":
            return new.exp() - old.exp()
    raise ValueError(f"unknown statistic {name!r}")


def trajectory_range(values: Tensor, segments: Segments, over: str) -> tuple[Tensor, Tensor]:
    """(smallest, largest) [R] of values [N] aggregated `over` sum, mean or max: one value, given twice.

    `any` has two: a trajectory is out of bounds when its smallest or its largest token is. A trajectory without
    tokens has 0, the value of equal policies for most statistics.
    """
    match over:
        case "sum":
            value = segments.sum(values)
            return value, value
        case "mean":
            value = segments.mean(values)
            return value, value
        case "max" | "any":
            has_tokens = segments.counts() > 0
            largest = torch.where(has_tokens, segments.max(values), 0.0)
            return (torch.where(has_tokens, segments.min(values), 0.0) if over == "any" else largest), largest
    raise ValueError(f"unknown aggregation {over!r}")
