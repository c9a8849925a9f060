"""SAPO: a smooth gate instead of a clip (arXiv:2511.20347)."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.losses.token_loss import TokenLoss


def soft_gated_loss(
    ratio: Tensor, advantages: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> TokenLoss:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A (0 counts as negative); [N] each.

    At r = 1 the gradient is that of -r A; it fades as the ratio leaves 1 on either side.
    """
    tau = torch.where(advantages > 0, tau_positive, tau_negative).to(ratio)
    return TokenLoss(-(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * advantages, {})
