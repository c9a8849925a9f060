"""Advantages from one reward a trajectory: a baseline is subtracted, what is left is divided by a scale.

| algorithm | baseline | scale |
|---|---|---|
| GRPO, arXiv:2402.03300 section 4.1.2 | mean | std |
| Dr. GRPO, arXiv:2503.20783 | mean | none |
| RLOO, arXiv:2402.14740 | leave_one_out | none |
| OPO, arXiv:2505.23585 | length_weighted | none |
| MaxRL, arXiv:2602.02710 | mean | mean |
| GPG, arXiv:2504.02546 | mean | nonzero_share |
| ReMax, arXiv:2310.10505 | greedy | none |
| REINFORCE++, arXiv:2501.03262 | none, or mean | none, and whitened over tokens |
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.groups import Deviation, Groups, Over

Baseline = Literal["mean", "leave_one_out", "length_weighted", "greedy", "none"]
Scale = Literal["std", "mean", "nonzero_share", "none"]
EpsilonForm = Literal["added", "floor", "where_positive"]
"""scale + epsilon; max(scale, epsilon); or scale + epsilon where the scale is positive and 1 where it is 0."""


def outcome_advantages(
    rewards: Tensor,
    group_index: Tensor,
    *,
    baseline: Baseline = "mean",
    baseline_over: Over = "group",
    scale: Scale = "std",
    scale_over: Over = "group",
    deviation: Deviation = "sample",
    deviation_around: Literal["mean", "baseline"] = "mean",
    epsilon: float = 1e-6,
    epsilon_form: EpsilonForm = "added",
    group_of_one: Literal["zero", "reward"] = "zero",
    lengths: Tensor | None = None,
    greedy_rewards: Tensor | None = None,
) -> Tensor:
    """(reward - baseline) / (scale + epsilon) of each trajectory.

    rewards [R] of the whole batch, NaN where a trajectory has none; group_index [R] int64 from 0 -> [R] in the
    rewards' dtype, computed in float64. lengths [R] (`length_weighted`): trained tokens. greedy_rewards [R]
    (`greedy`): the reward of a greedy rollout of the same prompt.

    An unscored trajectory gets 0 and counts nowhere. Where all rewards under the baseline are equal the
    advantage is exactly 0: nothing is better than anything else, and dividing rounding noise by a tiny
    deviation would say otherwise. `group_of_one`: what a lone trajectory gets, 0 or its own reward (baseline 0,
    and scale 1 where the scale is of the group too, as in verl and SkyRL).
    """
    scored = ~rewards.isnan()
    reward, group = rewards[scored].double(), group_index[scored]
    compared = Groups.of(group, baseline_over)
    baselines = group_baselines(
        reward,
        group,
        baseline=baseline,
        over=baseline_over,
        lengths=None if lengths is None else lengths[scored],
        greedy_rewards=None if greedy_rewards is None else greedy_rewards[scored],
    )
    centred = reward - baselines
    if baseline not in ("greedy", "none"):
        centred = torch.where(compared.are_equal(reward), 0.0, centred)
        if group_of_one == "reward":
            centred = torch.where(compared.count(reward) == 1, reward, centred)
    advantages = centred
    if scale != "none":
        scales = group_scales(
            reward,
            group,
            scale=scale,
            over=scale_over,
            deviation=deviation,
            around=baselines if deviation_around == "baseline" else None,
        )
        advantages = divide(centred, scales, epsilon, epsilon_form)
        if scale_over == "group" and group_of_one == "reward":
            advantages = torch.where(Groups.of(group).count(reward) == 1, centred, advantages)
    result = torch.zeros_like(rewards)
    result[scored] = torch.where(centred == 0, 0.0, advantages).to(rewards.dtype)
    return result


def group_baselines(
    rewards: Tensor,
    group_index: Tensor,
    *,
    baseline: Baseline,
    over: Over = "group",
    lengths: Tensor | None = None,
    greedy_rewards: Tensor | None = None,
) -> Tensor:
    """What each reward is compared with; rewards [R], all scored -> [R].

    The leave-one-out mean of a group of one is its own reward. `length_weighted` is the variance-minimising
    baseline if a gradient's squared norm grows with its length: sum of length * reward / sum of length; where
    no trajectory of a group has a trained token, nothing trains and the baseline is 0.
    """
    groups = Groups.of(group_index, over)
    if baseline == "mean":
        return groups.mean(rewards)
    if baseline == "leave_one_out":
        return groups.leave_one_out_mean(rewards)
    if baseline == "length_weighted":
        assert lengths is not None
        weights = lengths.to(rewards.dtype)
        total = groups.sum(weights)
        return torch.where(total > 0, groups.sum(weights * rewards) / total, 0.0)
    if baseline == "greedy":
        assert greedy_rewards is not None
        return greedy_rewards.to(rewards.dtype)
    return torch.zeros_like(rewards)


def group_scales(
    rewards: Tensor,
    group_index: Tensor,
    *,
    scale: Scale,
    over: Over = "group",
    deviation: Deviation = "sample",
    around: Tensor | None = None,
) -> Tensor:
    """What each centred reward is divided by, before epsilon; rewards [R], all scored -> [R].

    `nonzero_share`: the share of rewards that are not 0, which makes the gradient independent of how many
    groups still train; 1 / R if there is none.
    """
    groups = Groups.of(group_index, over)
    if scale == "std":
        return groups.deviation(rewards, deviation, around)
    if scale == "mean":
        return groups.mean(rewards)
    if scale == "nonzero_share":
        num_nonzero = groups.sum((rewards != 0).to(rewards.dtype))
        return num_nonzero.clamp(min=1) / groups.count(rewards)
    return torch.ones_like(rewards)


def divide(values: Tensor, scales: Tensor, epsilon: float, form: EpsilonForm) -> Tensor:
    """values [R] / scales [R], kept away from 0 in one of the three ways that peers use."""
    if form == "floor":
        return values / scales.clamp(min=epsilon)
    if form == "where_positive":
        return torch.where(scales > 0, values / (scales + epsilon), values)
    return values / (scales + epsilon)
