"""gae: advantages and returns of a critic, with what each peer does at observations and padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms.advantages import token_rewards
from asyncrl.algorithms.advantages.estimators import critic_advantages
from asyncrl.algorithms.segments import Segments
from tests.algorithms.advantage_tables import assert_tokens_equal, table, whitened_alone
from tests.algorithms.goldens import Golden, assert_equal

MASK_READERS = ("verl", "nemo", "openrlhf")
"""Peers whose recursion is over trained tokens. The others take every column for a trained token: so do we here."""


def replay(case: Golden) -> None:
    if "_compute_advantages" in case.function:
        _areal(case)
    elif case.function.endswith("GeneralizedAdvantageEstimator.compute_advantage"):
        _nemo_whole(case)
    elif "packed" in case.function:
        _packed(case)
    elif case.peer in MASK_READERS:
        config = table("gae", case.peer, gamma=case.params["gamma"], lam=case.params["lam"])
        _compare_tokens(case, config, case.flat("token_rewards"), case.flat("values"))
    else:
        _every_column(case)


def places(case: Golden) -> Tensor:
    """[N]: the column of each trained token."""
    return torch.arange(case.mask.shape[1]).expand(case.mask.shape)[case.mask]


def _compare_tokens(case: Golden, config: Any, rewards: Tensor, values: Tensor) -> None:
    advantages, returns = critic_advantages(config, rewards, values, case.segments, positions=places(case))
    assert_tokens_equal(case, "returns", returns)
    if "advantages_before_whitening" in case.outputs:
        assert_tokens_equal(case, "advantages_before_whitening", advantages)
    if "advantages" in case.outputs:
        assert_tokens_equal(case, "advantages", whitened_alone(config, advantages))


def _every_column(case: Golden) -> None:
    """The peer's recursion sees no mask: [B, T] is B trajectories of T trained tokens, from column `start` on."""
    start = case.params.get("start", 0)
    rewards, values = case.tensor("token_rewards")[:, start:], case.tensor("values")[:, start:]
    config = table("gae", case.peer, gamma=case.params["gamma"], lam=case.params["lam"], gaps="carry")
    segments = Segments.of_counts([rewards.shape[1]] * len(rewards))
    advantages, returns = critic_advantages(config, rewards.flatten(), values.flatten(), segments)
    assert_equal(case, "returns", returns.view_as(rewards), case.output("returns"))
    before = case.output("advantages_before_whitening")
    assert_equal(case, "advantages_before_whitening", advantages.view_as(rewards), before)
    if "advantages" in case.outputs:
        whitened = whitened_alone(config, advantages.view_as(rewards)[case.mask])
        assert_tokens_equal(case, "advantages", whitened)


def _packed(case: Golden) -> None:
    """open-instruct: an observation, like the last token, is the terminal token of what comes before it."""
    rewards = case.tensor("token_rewards")
    ends = ~case.mask | case.tensor("dones").bool()
    ends[:, -1] = True
    starts = ends.flatten().roll(1)
    starts[0] = False
    index = starts.long().cumsum(0)
    segments = Segments(index, int(index.max()) + 1)
    config = table("gae", "open_instruct", gamma=case.params["gamma"], lam=case.params["lam"], gaps="carry")
    advantages, returns = critic_advantages(
        config, rewards.flatten(), case.tensor("values").flatten(), segments
    )
    for name, found in (("advantages_before_whitening", advantages), ("returns", returns)):
        assert_equal(case, name, found.view_as(rewards)[case.mask], case.output(name)[case.mask])


def _nemo_whole(case: Golden) -> None:
    params = case.params
    lam, lam_value = params["gae_lambda_policy"], params["gae_lambda_value"]
    config = table(
        "gae",
        "nemo",
        gamma=params["gae_gamma"],
        lam=params["gae_lambda"] if lam is None else lam,
        lam_value=params["gae_lambda"] if lam_value is None else lam_value,
        length_adaptive_alpha=float(params["length_adaptive_alpha"]),
    )
    kl = case.flat("log_probs") - case.flat("ref_log_probs")  # k1
    coef = params["reference_policy_kl_penalty"] if params.get("use_kl_in_reward") else 0.0
    rewards = token_rewards(case.tensor("rewards"), case.segments, kl=kl, kl_coef=coef)
    _compare_tokens(case, config, rewards, case.flat("values"))


def _areal(case: Golden) -> None:
    """AReaL's columns are shifted left by one: column t holds token t + 1, and the last one holds none."""
    mask = case.output("loss_mask_shifted")[:, :-1].bool()
    segments = Segments.of_counts(mask.sum(1))
    kl = case.tensor("log_probs")[:, 1:] - case.tensor("ref_log_probs_already_shifted")[:, :-1]  # k1
    rewards = token_rewards(case.tensor("rewards"), segments, kl=kl[mask], kl_coef=case.params["kl_coef"])
    values = case.tensor("values")
    is_cut = case.tensor("attention_mask").bool().all(1)
    advantages, returns = critic_advantages(
        table("gae", "areal", gamma=case.params["gamma"], lam=case.params["lam"]),
        rewards,
        values[:, :-1][mask],
        segments,
        bootstrap_values=values[:, -1].where(is_cut, 0.0),
    )
    found = {"token_rewards": rewards, "advantages_before_whitening": advantages, "returns": returns}
    for name, tokens in found.items():
        assert_equal(case, name, tokens, case.output(name)[:, :-1][mask])
