"""CISPO: the importance ratio is a bounded weight of REINFORCE and takes no gradient (arXiv:2506.13585)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asyncrl.algorithms.losses.token_loss import TokenLoss


def cispo_loss(
    ratio: Tensor,
    learner_logprobs: Tensor,
    advantages: Tensor,
    *,
    ratio_min: float = 0.0,
    ratio_max: float,
    outside: Literal["clip", "zero"] = "clip",
) -> TokenLoss:
    """-stop_gradient(clip(r, ratio_min, ratio_max)) A log pi; [N] each. Every token keeps a gradient.

    The bounds are those of the ratio itself: verl and NeMo write 1 - clip_low and 1 + clip_high, open-instruct has no
    lower one, TRL's `epsilon_high` is the upper one. outside `zero`: the weight is 0 there (SkyRL's rollout_is).
    Diagnostic pg_clipfrac: the ratio is outside.
    """
    ratio = ratio.detach()
    clipped = ratio.clamp(ratio_min, ratio_max)
    out = clipped != ratio
    weight = clipped if outside == "clip" else torch.where(out, 0.0, ratio)
    return TokenLoss(-weight * advantages * learner_logprobs, {"pg_clipfrac": out})
