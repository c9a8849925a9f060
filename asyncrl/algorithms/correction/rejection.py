"""Rejection: which tokens leave the loss because two policies are too far apart on them."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from asyncrl.algorithms.correction.statistics import token_statistic, trajectory_range
from asyncrl.algorithms.correction.weights import AllReduce, is_above, is_below
from asyncrl.algorithms.segments import Segments
from asyncrl.config.corrections import BoundsRejection

INFINITY_BITS = 0x7F800000
"""Of a float32. Those of smaller floats above 0 are smaller, those of a NaN larger."""


@dataclass(slots=True, frozen=True)
class Measured:
    """A criterion's statistic over the tokens that it looks at, M of them."""

    tokens: Tensor
    """[M]: the statistic at each token; a trajectory's value at each of its tokens unless it is a token's own."""
    trajectories: Tensor
    """[R]: the trajectory's value; the mean of its tokens' for a criterion over tokens."""
    segments: Segments
    """Of the M tokens."""
    lower: float | None
    upper: float | None
    rejected: Tensor
    """[N] bool: tokens out of bounds, or of trajectories that are, as far as `only` lets them be rejected."""
    below: Tensor
    """[R] bool: trajectories below the lower bound (with a token below it, for token and any)."""
    above: Tensor
    """[R] bool, likewise."""


def measure(
    new: Tensor,
    old: Tensor,
    among: Tensor,
    segments: Segments,
    config: BoundsRejection,
    *,
    advantages: Tensor | None,
    max_log_ratio: float | None,
) -> Measured:
    """new, old: log-probs [N]; among [N] bool: the tokens that are looked at. No other token is rejected."""
    lower, upper = config.lower, config.upper
    if config.statistic == "ratio":  # aggregated and compared as logarithms, so that no product overflows
        lower, upper = lower and log(lower), upper and log(upper)
    looked_at = Segments(segments.index[among], segments.num_trajectories)
    tokens = token_statistic(config.statistic, new[among], old[among], max_log_ratio=max_log_ratio)
    rejected = torch.zeros_like(among)
    if config.over == "token":
        token_below, token_above = is_below(tokens, lower), is_above(tokens, upper)
        rejected[among] = token_below | token_above
        below, above = _any(token_below, looked_at), _any(token_above, looked_at)
        trajectories = looked_at.mean(tokens)
    else:
        smallest, trajectories = trajectory_range(tokens, looked_at, config.over)
        has_tokens = looked_at.counts() > 0
        below, above = is_below(smallest, lower) & has_tokens, is_above(trajectories, upper) & has_tokens
        rejected[among] = looked_at.spread(below | above)
        tokens = looked_at.spread(trajectories)
    if config.only != "all":
        rejected = rejected & _may_be_rejected(new - old, advantages, config.only)
    return Measured(tokens, trajectories, looked_at, lower, upper, rejected, below, above)


def _may_be_rejected(log_ratio: Tensor, advantages: Tensor | None, only: str) -> Tensor:
    """[N] bool: BoundsRejection.only."""
    if advantages is None:
        raise ValueError(f"a rejection with only: {only} needs the advantages")
    return advantages < 0 if only == "negative_advantage" else log_ratio * advantages > 0


def within_second_moment(
    new: Tensor, old: Tensor, among: Tensor, *, threshold: float, all_reduce: AllReduce
) -> Tensor:
    """[N] bool: M2PO, the most tokens of the batch whose mean squared log ratio is under the threshold.

    new, old: log-probs [N]; among [N] bool. Drops the largest squares of the batch first; equal ones go together. The
    smallest stay even where they are over the threshold, as in AReaL. Exact, and the same for any split over ranks:
    floats above 0 are ordered as their bits, so 31 sums find the first square that no longer fits. No token: none.
    """
    bits = (new - old).float().square().view(torch.int32)
    ordered = bits[among].sort().values
    sums = torch.cat(
        [ordered.new_zeros(1, dtype=torch.float64), ordered.view(torch.float32).double().cumsum(0)]
    )

    def count_and_sum_below(cut: int) -> tuple[float, float]:
        count = torch.searchsorted(ordered, ordered.new_tensor(cut))
        count, total = all_reduce(torch.stack([count.double(), sums[count]])).tolist()
        return count, total

    fits, cut = 0, INFINITY_BITS
    while cut - fits > 1:
        middle = (fits + cut) // 2
        count, total = count_and_sum_below(middle + 1)
        if count == 0 or total < threshold * count:
            fits = middle
        else:
            cut = middle
    count, _ = count_and_sum_below(cut)
    is_nan = bits > INFINITY_BITS  # stays in the loss, for the gradient norm to refuse
    return among & ((bits < cut if count > 0 else bits <= cut) | is_nan)


def _any(flags: Tensor, segments: Segments) -> Tensor:
    """flags [M] bool -> [R] bool."""
    return segments.sum(flags.to(torch.int32)) > 0
