"""Trust regions measured in probabilities rather than ratios: DPPO (arXiv:2602.04879) and prime-rl's two-sided IPO.

A rare token's ratio is wild while its probability hardly moves: PPO's clip silences it, these masks do not.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asyncrl.algorithms.losses.token_loss import TokenLoss

Divergence = Literal["tv", "kl"]


def within_trust_region(
    learner_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    *,
    divergence: Divergence = "tv",
    delta_low: float,
    delta_high: float,
    zero_is_negative: bool = False,
) -> Tensor:
    """[N] bool: False where the token has left the region in the direction that its advantage pushes.

    With p, q the learner's and the anchor's probability of the sampled token: for A > 0, p > q and D > delta_high; for
    A < 0, p < q and D > delta_low. D is |p - q| (tv), or the KL of the two Bernoulli distributions q and p (kl).
    zero_is_negative: a token with A = 0 goes by the rule of A < 0 (prime-rl); it matters to diagnostics only.
    """
    p, q = learner_logprobs.detach().exp(), anchor_logprobs.exp()
    if divergence == "tv":
        distance = (p - q).abs()
    else:
        tiny = 1e-8  # of a token that is certain, log(1 - p) is -inf
        others = (1 - q) * ((1 - q + tiny) / (1 - p + tiny)).log()
        distance = q * (anchor_logprobs - learner_logprobs.detach()) + others
    down = advantages <= 0 if zero_is_negative else advantages < 0
    left_upwards = (advantages > 0) & (p > q) & (distance > delta_high)
    left_downwards = down & (p < q) & (distance > delta_low)
    return ~(left_upwards | left_downwards)


def near_in_probability(learner_logprobs: Tensor, anchor_logprobs: Tensor, *, threshold: float) -> Tensor:
    """[N] bool: |p - q| <= threshold, whatever the advantage (prime-rl's `ipo`)."""
    return (learner_logprobs.detach().exp() - anchor_logprobs.exp()).abs() <= threshold


def masked_ratio_loss(
    ratio: Tensor,
    learner_logprobs: Tensor,
    advantages: Tensor,
    keep: Tensor,
    *,
    max_ratio: float | None = None,
    score_function: bool = False,
) -> TokenLoss:
    """-r A where `keep`, else 0; [N] each.

    max_ratio bounds r. score_function: -stop_gradient(r) A log pi, the same gradient while r is not bounded, and one
    that does not vanish where it is (verl, with max_ratio 20). Diagnostic pg_clipfrac: not kept.
    """
    bounded = ratio if max_ratio is None else ratio.clamp(max=max_ratio)
    value = bounded.detach() * learner_logprobs if score_function else bounded
    return TokenLoss(torch.where(keep, -value * advantages, 0.0), {"pg_clipfrac": ~keep})
