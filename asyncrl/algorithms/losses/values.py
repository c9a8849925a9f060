"""The critic's loss, and how much of the returns it explains."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from asyncrl.algorithms.losses.aggregation import Counts, aggregate
from asyncrl.algorithms.losses.token_loss import TokenLoss
from asyncrl.algorithms.segments import Segments
from asyncrl.config.losses import ValueLossConfig


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    clip: float | None = None,
    error: Literal["squared", "huber"] = "squared",
    huber_delta: float = 10.0,
) -> TokenLoss:
    """max(e(V), e(V_old + clip(V - V_old, -clip, clip))) with e(V) = (V - return)^2 / 2; [N] each -> [N].

    The clipped value loss of PPO's reference implementation (openai/baselines, ppo2); `clip=None` leaves e(V).
    error: `huber` is quadratic within `huber_delta` of the return and linear beyond (AReaL).
    Diagnostic vf_clipfrac: the clip decides the loss, and so cuts the gradient.
    """
    unclipped = _error(values - returns, error, huber_delta)
    if clip is None:
        return TokenLoss(unclipped, {"vf_clipfrac": torch.zeros_like(values, dtype=torch.bool)})
    clipped = _error(values.clamp(old_values - clip, old_values + clip) - returns, error, huber_delta)
    return TokenLoss(unclipped.maximum(clipped), {"vf_clipfrac": clipped > unclipped})


def _error(difference: Tensor, error: Literal["squared", "huber"], delta: float) -> Tensor:
    if error == "squared":
        return difference.square() / 2
    return torch.nn.functional.huber_loss(
        difference, torch.zeros_like(difference), reduction="none", delta=delta
    )


def critic_objective(
    config: ValueLossConfig,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    segments: Segments,
    *,
    counts: Counts | None = None,
    group_index: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(this microbatch's share of the mini-batch's value loss, metric -> [N]); counts are the whole mini-batch's."""
    loss, diagnostics = value_loss(
        values, old_values, returns, clip=config.clip, error=config.error, huber_delta=config.huber_delta
    )
    aggregation = config.aggregation
    share = aggregate(
        loss,
        segments,
        mode=aggregation.mode,
        length=aggregation.length,
        divide_by=aggregation.divide_by,
        at_least=aggregation.at_least,
        counts=counts,
        group_index=group_index,
    )
    return share, diagnostics


class ValueSums(NamedTuple):
    """Sums over tokens, float64 scalars: add those of microbatches, all-reduce them over ranks, then ask."""

    tokens: Tensor
    returns: Tensor
    returns_squared: Tensor
    residuals: Tensor
    residuals_squared: Tensor


def value_sums(values: Tensor, returns: Tensor) -> ValueSums:
    """values, returns [N]."""
    returns = returns.detach().double()
    residuals = returns - values.detach().double()
    return ValueSums(
        tokens=returns.new_tensor(float(len(returns))),
        returns=returns.sum(),
        returns_squared=returns.square().sum(),
        residuals=residuals.sum(),
        residuals_squared=residuals.square().sum(),
    )


def explained_variance(sums: ValueSums, *, epsilon: float = 0.0) -> Tensor:
    """1 - Var(returns - values) / (Var(returns) + epsilon): 1, perfect; 0, no better than a constant; below, worse.

    Variances divide by n - 1 (it cancels unless epsilon is there; verl adds 1e-5). NaN for fewer than two tokens, and
    without epsilon where the returns do not vary: then there is nothing to explain.
    """
    n = sums.tokens
    residual = (sums.residuals_squared - sums.residuals.square() / n) / (n - 1)
    total = (sums.returns_squared - sums.returns.square() / n) / (n - 1)
    return 1.0 - residual / (total + epsilon)
