"""Generalised advantage estimation (arXiv:1506.02438) over flat tokens."""

from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.advantages.recurrence import Gaps, backward_recurrence, next_in_trajectory, passing
from asyncrl.algorithms.segments import Segments


def generalised_advantages(
    rewards: Tensor,
    values: Tensor,
    segments: Segments,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    gaps: Gaps = "carry",
    positions: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
) -> Tensor:
    """A_t = sum over k of (gamma lam)^k (r + gamma V' - V) at t + k; rewards, values [N] -> [N], no gradient.

    Returns (targets of the critic) are advantages + values. Only trained tokens exist, so state and advantage
    carry over observations and padding by construction (verl, NeMo RL, AReaL). `discount` is OpenRLHF's: an
    untrained token is a state of value 0, through which the recursion runs. `cut`: an observation ends the
    episode. positions [N]: each token's place in its trajectory, for these two.

    lam: a number, or [R], one a trajectory: see `length_adaptive_lambda`. bootstrap_values [R]: the value
    after the last token, of an answer cut at its maximum length; 0 by default: the episode ended.
    """
    values = values.detach()
    if isinstance(lam, Tensor):
        lam = segments.spread(lam.to(values.dtype))
    next_values = next_in_trajectory(values, segments, bootstrap_values)
    # Through g untrained tokens of value 0: A_t = r - V + (gamma lam)^g (gamma V' + gamma lam A').
    through = passing(gamma * lam, segments, gaps, positions, values.dtype)
    errors = rewards + through * gamma * next_values - values
    return backward_recurrence(errors, through * gamma * lam, segments)


def length_adaptive_lambda(segments: Segments, alpha: float) -> Tensor:
    """[R]: 1 - 1 / (alpha * trained tokens), in [0, 1]: VAPO's policy lambda, arXiv:2504.05118."""
    counts = segments.counts().double()
    return (1.0 - 1.0 / (alpha * counts.clamp(min=1))).clamp(0.0, 1.0)
