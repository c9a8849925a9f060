"""Losses, token by token, and how they become one number.

objective.py    the loss of a mini-batch: policy loss, KL, entropy, cross entropy, as `LossConfig` says
policy.py       from `policy.type` to one of the families, and which tokens a mini-batch selects
ratios.py       importance ratios of tokens and trajectories
ppo.py  sequence.py  cispo.py  sapo.py  dppo.py  covariance.py  reinforce.py    a family each
kl.py  entropy.py    what is added to a policy loss        kl_controller.py    the coefficient of a KL
aggregation.py  weights of tokens, and the denominator    values.py    the critic
"""

from asyncrl.algorithms.losses.aggregation import Counts, aggregate, aggregation_weights, denominator
from asyncrl.algorithms.losses.ppo import clipped_surrogate
from asyncrl.algorithms.losses.ratios import MAX_LOG_RATIO, bounded_exp, importance_ratio
from asyncrl.algorithms.losses.token_loss import TokenLoss

__all__ = [
    "MAX_LOG_RATIO",
    "Counts",
    "TokenLoss",
    "aggregate",
    "aggregation_weights",
    "bounded_exp",
    "clipped_surrogate",
    "denominator",
    "importance_ratio",
]
