"""Advantages: how much better each trajectory, or token, is than what the policy would have got anyway.

outcome.py     one reward a trajectory: GRPO, Dr. GRPO, RLOO, OPO, MaxRL, GPG, ReMax   (statistics in groups.py)
pass_at_k.py   only the best of a group          components.py  several rewards a trajectory: GDPO
credit.py      one reward a trajectory -> one a token, with a KL penalty
returns.py     REINFORCE++     gae.py  a critic     token_baseline.py  OTB      (recurrence.py beneath them)
whitening.py   over all tokens of the batch, from sums that ranks add
"""

from __future__ import annotations

from asyncrl.algorithms.advantages.components import component_advantages
from asyncrl.algorithms.advantages.credit import minus_kl, token_rewards
from asyncrl.algorithms.advantages.gae import generalised_advantages, length_adaptive_lambda
from asyncrl.algorithms.advantages.groups import Groups
from asyncrl.algorithms.advantages.outcome import group_baselines, group_scales, outcome_advantages
from asyncrl.algorithms.advantages.pass_at_k import pass_at_k_advantages
from asyncrl.algorithms.advantages.returns import rewards_to_go
from asyncrl.algorithms.advantages.token_baseline import optimal_token_baselines
from asyncrl.algorithms.advantages.whitening import Moments, whiten

__all__ = [
    "Groups",
    "Moments",
    "component_advantages",
    "generalised_advantages",
    "group_baselines",
    "group_scales",
    "length_adaptive_lambda",
    "minus_kl",
    "optimal_token_baselines",
    "outcome_advantages",
    "pass_at_k_advantages",
    "rewards_to_go",
    "token_rewards",
    "whiten",
]
