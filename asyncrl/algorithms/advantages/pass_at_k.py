"""Pass@k as the objective: only the best trajectory of a group is reinforced."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.groups import Deviation, Groups


def pass_at_k_advantages(
    rewards: Tensor,
    group_index: Tensor,
    *,
    divide_by_std: bool = True,
    deviation: Deviation = "sample",
    epsilon: float = 1e-6,
) -> Tensor:
    """The best reward of a group minus the second best, at the best trajectory; 0 at the others.

    rewards [R] of the whole batch, NaN where a trajectory has none; group_index [R] -> [R]. k is the group
    size. Divided by the group's deviation + epsilon where asked. A tie for the best, equal rewards and a
    group of one give exactly 0. Best-of-k credit as in verl's `grpo_passk`, arXiv:2503.19595.
    """
    scored = ~rewards.isnan()
    reward, groups = rewards[scored].double(), Groups.of(group_index[scored])
    best = groups.max(reward)
    is_best = reward == best
    second = groups.max(torch.where(is_best, -torch.inf, reward))
    alone = is_best & (groups.sum(is_best.double()) == 1) & second.isfinite()
    lead = torch.where(alone, best - second, 0.0)
    if divide_by_std:
        lead = lead / (groups.deviation(reward, deviation) + epsilon)
    advantages = torch.zeros_like(rewards)
    advantages[scored] = lead.to(rewards.dtype)
    return advantages
