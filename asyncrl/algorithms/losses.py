"""Policy losses, token by token."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8. Larger log ratios are cut to it before exp, so that no finite input gives inf or, through
inf * 0, NaN. A NaN stays NaN: the gradient norm then refuses the step."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log ratio cut to [-MAX_LOG_RATIO, MAX_LOG_RATIO]; NaN stays NaN."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_policy_loss(
    learner_logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(learner - proximal); [N] each.

    Returns (loss [N], clipped [N] bool: where the clip decides the loss, and so cuts the gradient).
    PPO: arXiv:1707.06347, equation 7.
    """
    ratio = bounded_exp(learner_logprobs - proximal_logprobs)
    loss = -ratio * advantages
    clipped_loss = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return loss.maximum(clipped_loss), clipped_loss > loss
