"""Losses whose ratio belongs to a whole trajectory: GMPO and VESPO.

GSPO is PPO's clip of a sequence ratio (ratios.py: `sequence`, `sequence_token`), RLOO that of `sequence_sum`. LUSPO is
GSPO aggregated with seq-mean-token-sum. What a trajectory has one of stands here at each of its tokens: [N].
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.losses.token_loss import TokenLoss
from asyncrl.algorithms.segments import Segments


def geometric_mean_surrogate(
    learner_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    segments: Segments,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-A exp(mean over the trajectory of its clipped log ratios), A the mean of its advantages; GMPO: arXiv:2507.20673.

    A token's log ratio is clipped to [-clip_low, clip_high] on the side that its own advantage would push it to.
    Aggregate with seq-mean-token-mean: every token of a trajectory holds the trajectory's loss. Diagnostics: the
    token's log ratio is outside the bounds, pg_clipfrac where A > 0 and pg_clipfrac_lower where A < 0.
    """
    log_ratio = learner_logprobs - anchor_logprobs
    clipped = log_ratio.clamp(-clip_low, clip_high)
    sign = advantages.sign()
    pessimistic = sign * (sign * log_ratio).minimum(sign * clipped)
    ratio = segments.mean(pessimistic).exp()
    loss = segments.spread(-segments.mean(advantages) * ratio)
    cut = log_ratio.detach() != clipped.detach()
    return TokenLoss(
        loss, {"pg_clipfrac": cut & (advantages > 0), "pg_clipfrac_lower": cut & (advantages < 0)}
    )


def gamma_weights(
    log_ratio: Tensor,
    advantages: Tensor,
    segments: Segments,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Tensor:
    """phi(w) = e^lambda w^k e^(-lambda w) of the trajectory's ratio w = exp(sum of log ratios), [N]; 1 at w = 1.

    k and lambda by the sign of the advantage (0 counts as positive). No gradient. The reshaping kernel of VESPO:
    arXiv:2602.10693.
    """
    total = segments.spread(segments.sum(log_ratio.detach()))
    positive = advantages >= 0
    k = torch.where(positive, k_positive, k_negative).to(total)
    rate = torch.where(positive, lambda_positive, lambda_negative).to(total)
    return (rate + k * total - rate * total.exp()).exp()


def vespo_loss(learner_logprobs: Tensor, advantages: Tensor, weights: Tensor) -> TokenLoss:
    """-phi A log pi, with phi from gamma_weights; [N] each. Diagnostic vespo_phi."""
    return TokenLoss(-weights * advantages * learner_logprobs, {"vespo_phi": weights})
