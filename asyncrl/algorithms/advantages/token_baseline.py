"""A baseline a token: the reward to go of the group at the same step, weighted by how far each path has moved."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.recurrence import backward_recurrence
from asyncrl.algorithms.segments import Segments


def optimal_token_baselines(
    returns: Tensor,
    logprobs: Tensor,
    sum_pi_squared: Tensor,
    segments: Segments,
    group_index: Tensor,
    *,
    weights: Tensor | None = None,
    zero_tail: bool = False,
    positions: Tensor | None = None,
    epsilon: float = 1e-8,
) -> Tensor:
    """b_t = sum of G W / (sum of W + epsilon) over the group's trajectories at step t; [N].

    returns [N]: rewards to go. W_t = sum over s <= t of (1 - 2 pi_s + sum_pi_squared_s) * weights_s^2, the
    squared norm of the logit gradients along the path; sum_pi_squared [N] sums pi^2 over the vocabulary,
    weights [N] are importance weights. group_index [R]; a group must be whole. "The Optimal Token Baseline";
    verl's `tir_optimal_token_baseline`, with `positions` [N] (places in the padded answer, observations
    counted, instead of the trained token's number) its `optimal_token_baseline`.

    A trajectory that is the only one of its group with tokens has baseline 0. `zero_tail`: so has the part of
    the one longest trajectory that no other of its group reaches, where the baseline would be its own return.
    """
    moved = 1.0 - 2.0 * logprobs.exp() + sum_pi_squared
    if weights is not None:
        moved = moved * weights.square()
    path = _running_sum(moved, segments)
    steps = _step_numbers(segments) if positions is None else positions
    group, lengths = segments.spread(group_index), segments.counts()
    num_groups = int(group_index.max()) + 1 if len(group_index) else 0
    width = int(steps.max()) + 1 if len(steps) else 0
    cell = group * width + steps

    def over_group(values: Tensor) -> Tensor:
        return values.new_zeros(num_groups * width).index_add(0, cell, values)[cell]

    baselines = over_group(returns * path) / (over_group(path) + epsilon)
    second_longest = _second_longest(lengths, group_index, num_groups)[group_index]
    lone = segments.spread(second_longest == 0)
    baselines = torch.where(lone, 0.0, baselines)
    if zero_tail:
        is_longest, reach = segments.spread(lengths > second_longest), segments.spread(second_longest)
        baselines = torch.where(is_longest & (steps >= reach), 0.0, baselines)
    return baselines


def _running_sum(values: Tensor, segments: Segments) -> Tensor:
    """[N]: the sum over the trajectory's tokens up to each one."""
    mirrored = Segments(segments.index.flip(0), segments.num_trajectories)
    return backward_recurrence(values.flip(0), torch.ones_like(values), mirrored).flip(0)


def _step_numbers(segments: Segments) -> Tensor:
    """[N] int64: how many trained tokens of its trajectory come before each."""
    counts = segments.counts()
    starts = counts.cumsum(0) - counts
    return torch.arange(len(segments.index), device=counts.device) - segments.spread(starts)


def _second_longest(lengths: Tensor, group_index: Tensor, num_groups: int) -> Tensor:
    """[G]: the length of the group's second longest trajectory, equal to the longest's in a tie; 0 of one."""
    longest = lengths.new_zeros(num_groups).scatter_reduce(0, group_index, lengths, "amax")
    is_longest = lengths == longest[group_index]
    num_longest = longest.new_zeros(num_groups).index_add(0, group_index, is_longest.long())
    shorter = torch.where(is_longest, 0, lengths)
    second = lengths.new_zeros(num_groups).scatter_reduce(0, group_index, shorter, "amax")
    return torch.where(num_longest > 1, longest, second)
