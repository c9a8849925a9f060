"""The clipped surrogate of PPO: clip, clip-higher, dual clip, and TRL's bound on the unclipped ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.losses.token_loss import TokenLoss


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    max_ratio: float | None = None,
) -> TokenLoss:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A); ratio, advantages [N].

    PPO: arXiv:1707.06347, equation 7; clip_high > clip_low is "clip-higher" of DAPO: arXiv:2503.14476.
    dual_clip c > 1: where A < 0 the loss is at most -c A, so a ratio far above 1 stops pushing (arXiv:1912.09729).
    max_ratio: the unclipped branch sees min(r, max_ratio) instead, whatever the sign of A (TRL's `delta`).

    Diagnostics: pg_clipfrac, the clip decides the loss and so cuts the gradient; pg_clipfrac_lower, the dual clip does.
    The ratio may be of tokens (PPO) or of sequences (GSPO).
    """
    free = ratio if max_ratio is None else ratio.clamp(max=max_ratio)
    unclipped = -free * advantages
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = unclipped.maximum(clipped)
    diagnostics = {"pg_clipfrac": clipped > unclipped}
    if dual_clip is not None:
        bound = -dual_clip * advantages
        diagnostics["pg_clipfrac_lower"] = (advantages < 0) & (loss > bound)
        loss = torch.where(advantages < 0, loss.minimum(bound), loss)
    return TokenLoss(loss, diagnostics)
