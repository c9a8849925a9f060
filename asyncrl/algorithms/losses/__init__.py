"""Losses, token by token, and how they become one number."""

from asyncrl.algorithms.losses.aggregation import Counts, aggregate, aggregation_weights, denominator
from asyncrl.algorithms.losses.ppo import clipped_policy_loss, clipped_surrogate
from asyncrl.algorithms.losses.ratios import MAX_LOG_RATIO, bounded_exp, importance_ratio

__all__ = [
    "MAX_LOG_RATIO",
    "Counts",
    "aggregate",
    "aggregation_weights",
    "bounded_exp",
    "clipped_policy_loss",
    "clipped_surrogate",
    "denominator",
    "importance_ratio",
]
