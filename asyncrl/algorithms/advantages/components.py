"""Several rewards a trajectory: each is centred and scaled alone, so that none drowns the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.outcome import outcome_advantages


def component_advantages(
    components: Tensor, group_index: Tensor, *, weights: Sequence[float] | None = None, **outcome: Any
) -> Tensor:
    """sum over c of weight_c * outcome_advantages(reward c); components [C, R] -> [R]. Not yet normalised.

    A NaN component is a reward that does not apply to the trajectory: it adds nothing to it and counts in no
    statistic of that component. `outcome`: the options of `outcome_advantages`. GDPO (arXiv:2601.05242)
    normalises the sum afterwards: `whiten` over tokens (verl) or over trajectories (NeMo RL, TRL).
    """
    each = torch.stack([outcome_advantages(rewards, group_index, **outcome) for rewards in components])
    scale = torch.ones(len(components)) if weights is None else torch.tensor(weights)
    return scale.to(each) @ each
