"""From one reward a trajectory, and a KL penalty a token, to one reward a token."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.recurrence import is_last
from asyncrl.algorithms.segments import Segments


def token_rewards(
    rewards: Tensor,
    segments: Segments,
    *,
    kl: Tensor | None = None,
    kl_coef: float | Tensor = 0.0,
    clip: tuple[float, float] | None = None,
) -> Tensor:
    """The trajectory's reward at its last trained token, minus kl_coef * kl at every token; [N].

    rewards [R]; kl [N] as in `minus_kl`. `clip` bounds the rewards, not the penalty. The reward is on a trained
    token even if the trajectory ends in an observation; a trajectory without trained tokens loses it.
    InstructGPT: arXiv:2203.02155.
    """
    if clip is not None:
        rewards = rewards.clamp(*clip)
    at_end = torch.where(is_last(segments), segments.spread(rewards), 0.0)
    return at_end if kl is None else minus_kl(at_end, kl, kl_coef)


def minus_kl(token_rewards: Tensor, kl: Tensor, kl_coef: float | Tensor) -> Tensor:
    """token_rewards [N] - kl_coef * kl [N]: an estimate, any estimator's, of the KL from the reference policy at each
    token, under the log-probs before the batch's first step. An infinite kl stays infinite unless kl_coef is the
    number 0, which leaves the KL out."""
    if not isinstance(kl_coef, Tensor) and kl_coef == 0:
        return token_rewards
    return token_rewards - kl_coef * kl
