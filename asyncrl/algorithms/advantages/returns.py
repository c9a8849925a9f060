"""Rewards to go: what each token still earns, REINFORCE's credit for it."""

from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.advantages.recurrence import Gaps, backward_recurrence, passing
from asyncrl.algorithms.segments import Segments


def rewards_to_go(
    rewards: Tensor,
    segments: Segments,
    *,
    gamma: float = 1.0,
    gaps: Gaps = "carry",
    positions: Tensor | None = None,
) -> Tensor:
    """G_t = r_t + gamma * G_(t+1) over the trained tokens of each trajectory; rewards [N] -> [N].

    REINFORCE++: arXiv:2501.03262. Under `carry` (verl, ours) an observation costs nothing and hides nothing;
    under `discount` (OpenRLHF, slime) gamma is applied once a token, observations too; under `cut` (SkyRL)
    what is earned after an observation never reaches the tokens before it. positions [N]: each token's place in
    its trajectory, for these two.
    """
    through = passing(gamma, segments, gaps, positions, rewards.dtype)
    return backward_recurrence(rewards, gamma * through, segments)
