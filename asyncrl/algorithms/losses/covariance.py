"""Clip-Cov and KL-Cov: hold back the few tokens that drive the entropy down (arXiv:2505.22617).

Which tokens is decided once a mini-batch, before its first microbatch: the covariance is centred with means over all
of its tokens, and the number selected is a share of all of them. A selection [N] bool is cut up with the tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.losses.token_loss import TokenLoss


def covariances(learner_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """(A - mean A) (log pi - mean log pi), [N] each: all tokens of the mini-batch. No gradient."""
    logprobs = learner_logprobs.detach()
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def clip_cov_selection(
    covariance: Tensor,
    clipped: Tensor,
    *,
    share: float,
    lowest: float,
    highest: float,
    generator: torch.Generator | None = None,
) -> Tensor:
    """[N] bool: at random, max(1, floor(share N)) tokens with lowest < covariance < highest that PPO does not clip.

    All of those where they are fewer. generator: seed it with the version, so that a run can be repeated.
    """
    candidates = ((covariance > lowest) & (covariance < highest) & ~clipped).nonzero().squeeze(1)
    order = torch.randperm(len(candidates), generator=generator).to(candidates.device)
    return _select(covariance, candidates[order], share)


def kl_cov_selection(covariance: Tensor, *, share: float) -> Tensor:
    """[N] bool: the max(1, floor(share N)) tokens with the largest covariance."""
    return _select(covariance, covariance.argsort(descending=True), share)


def _select(covariance: Tensor, candidates: Tensor, share: float) -> Tensor:
    selected = torch.zeros_like(covariance, dtype=torch.bool)
    selected[candidates[: max(1, int(len(covariance) * share))]] = True
    return selected


def clip_cov_loss(token_loss: TokenLoss, selected: Tensor) -> TokenLoss:
    """PPO's loss, 0 at the selected tokens. pg_clipfrac counts the selected tokens."""
    return TokenLoss(torch.where(selected, 0.0, token_loss.loss), {"pg_clipfrac": selected})


def kl_cov_loss(
    ratio: Tensor, log_ratio: Tensor, advantages: Tensor, selected: Tensor, *, coef: float
) -> TokenLoss:
    """-r A, plus coef |log r| at the selected tokens; [N] each."""
    penalty = torch.where(selected, coef * log_ratio.abs(), 0.0)
    return TokenLoss(penalty - ratio * advantages, {"kl_cov_selected": selected})
