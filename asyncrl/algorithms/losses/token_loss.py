"""What every policy loss returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TokenLoss(NamedTuple):
    """One value a token; an aggregation makes a number of them."""

    loss: Tensor
    """[N], with gradient; to be minimised."""
    diagnostics: dict[str, Tensor]
    """Metric -> [N] float or bool, without gradient. Reported as a mean over trained tokens."""
