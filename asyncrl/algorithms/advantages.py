"""Advantages from the rewards of one prompt's group: what GRPO and its relatives share."""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(
    rewards: Tensor, group_index: Tensor, *, divide_by_std: bool, std_epsilon: float
) -> Tensor:
    """(reward - group mean) / (group standard deviation + std_epsilon), or the numerator alone.

    rewards [R], NaN where a trajectory has none; group_index [R] int64 from 0 -> [R] float32. The deviation
    is the sample one (n - 1). Computed in float64 over the scored trajectories of each group; the unscored
    get 0. A group with fewer than two scored trajectories, or with equal rewards, gets exactly 0: nothing in
    it is better than anything else, and dividing rounding noise by a tiny deviation would say otherwise.
    GRPO: arXiv:2402.03300, section 4.1.2; without the division, Dr.GRPO: arXiv:2503.20783.
    """
    scored = ~rewards.isnan()
    reward, group = rewards[scored].double(), group_index[scored]
    num_groups = int(group_index.max()) + 1 if len(group_index) else 0
    zeros = torch.zeros(num_groups, dtype=torch.float64, device=rewards.device)
    count = zeros.index_add(0, group, torch.ones_like(reward))
    centred = reward - (zeros.index_add(0, group, reward) / count)[group]
    if divide_by_std:
        variance = zeros.index_add(0, group, centred.square()) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + std_epsilon)[group]
    lowest = zeros.scatter_reduce(0, group, reward, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, group, reward, "amax", include_self=False)
    informative = (lowest < highest)[group]  # implies at least two
    advantages = torch.zeros_like(rewards, dtype=torch.float64)
    advantages[scored] = torch.where(informative, centred, 0.0)
    return advantages.float()
