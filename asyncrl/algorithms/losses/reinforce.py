"""Policy gradients without a trust region: REINFORCE, the importance-weighted gradient, DRO, and cross entropy."""

from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.losses.token_loss import TokenLoss


def reinforce_loss(learner_logprobs: Tensor, advantages: Tensor) -> TokenLoss:
    """-A log pi; [N] each. With the advantages of GPG (Group Policy Gradient) it is GPG."""
    return TokenLoss(-advantages * learner_logprobs, {})


def importance_weighted_loss(ratio: Tensor, advantages: Tensor) -> TokenLoss:
    """-r A; [N] each. On policy its gradient is that of REINFORCE."""
    return TokenLoss(-ratio * advantages, {"ratio": ratio.detach()})


def dro_loss(
    learner_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, *, beta: float
) -> TokenLoss:
    """-(A log pi - beta / 2 (log pi - log anchor)^2); [N] each. Token form of DRO: arXiv:2405.19107."""
    distance = (learner_logprobs - anchor_logprobs).square()
    return TokenLoss(-(advantages * learner_logprobs - beta / 2 * distance), {})


def negative_log_likelihood(learner_logprobs: Tensor) -> Tensor:
    """-log pi [N]: cross entropy with the tokens at hand, for supervised batches and for ptx."""
    return -learner_logprobs
