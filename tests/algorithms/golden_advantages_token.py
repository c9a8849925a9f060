"""advantages_token: rewards to go over observations, token baselines, KL penalties of single tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl.algorithms.advantages import rewards_to_go, token_rewards
from asyncrl.algorithms.advantages.estimators import (
    critic_advantages,
    token_advantages,
    token_baseline_advantages,
    trajectory_advantages,
)
from asyncrl.algorithms.segments import Segments
from tests.algorithms.advantage_tables import assert_tokens_equal, table, whitened_alone
from tests.algorithms.goldens import Golden, LeftOut, assert_equal


def replay(case: Golden) -> None:
    REPLAYS[case.function.rsplit("::")[-1].rsplit(".")[-1].split(" ")[0]](case)


def places(case: Golden) -> Tensor:
    return torch.arange(case.mask.shape[1]).expand(case.mask.shape)[case.mask]


def _reinforce_plus_plus(case: Golden) -> None:
    """verl carries the return over an observation, SkyRL cuts it there."""
    config = table("reinforce_plus_plus", case.peer, gamma=case.params["gamma"])
    returns = rewards_to_go(
        case.flat("token_rewards"),
        case.segments,
        gamma=config.gamma,
        gaps=config.gaps,
        positions=places(case),
    )
    assert_tokens_equal(case, "returns", returns)
    assert_tokens_equal(case, "advantages", whitened_alone(config, returns))


def _remax(case: Golden) -> None:
    returns = rewards_to_go(case.flat("token_rewards"), case.segments)
    assert_tokens_equal(case, "returns", returns)
    advantages = returns - case.segments.spread(case.tensor("reward_baselines"))
    assert_tokens_equal(case, "advantages", advantages)


def _discounted_returns(case: Golden) -> None:
    """OpenRLHF: gamma discounts observations too."""
    gaps = table("reinforce_plus_plus", case.peer).gaps
    returns = rewards_to_go(
        case.flat("token_rewards"),
        case.segments,
        gamma=case.params["gamma"],
        gaps=gaps,
        positions=places(case),
    )
    assert_tokens_equal(case, "returns", returns)


def _every_column(case: Golden) -> None:
    """The peer sees no mask: [B, T] is B trajectories of T trained tokens."""
    rewards = case.tensor("token_rewards")
    segments = Segments.of_counts([rewards.shape[1]] * len(rewards))
    returns = rewards_to_go(rewards.flatten(), segments, gamma=case.params["gamma"])
    assert_equal(case, "returns", returns.view_as(rewards), case.output("returns"))


def _slime(case: Golden) -> None:
    config = table("reinforce_plus_plus", "slime", gamma=case.params["gamma"])
    rewards = token_rewards(
        case.tensor("rewards"), case.segments, kl=case.flat("kl"), kl_coef=case.params["kl_coef"]
    )
    returns = rewards_to_go(
        rewards, case.segments, gamma=config.gamma, gaps=config.gaps, positions=places(case)
    )
    assert_tokens_equal(case, "returns", returns)


def _openrlhf_whole(case: Golden) -> None:
    params = case.params
    rewards, kl = case.tensor("rewards"), case.flat("kl")
    if params["estimator"] == "gae":
        config = table("gae", "openrlhf", gamma=params["gamma"], lam=params["lam"])
        tokens = token_rewards(rewards, case.segments, kl=kl, kl_coef=params["kl_coef"])
        advantages, returns = critic_advantages(
            config, tokens, case.flat("values"), case.segments, positions=places(case)
        )
    else:
        config = table("reinforce_plus_plus", "openrlhf", gamma=params["gamma"])
        returns = advantages = token_advantages(
            config, rewards, case.segments, positions=places(case), kl=kl, kl_coef=params["kl_coef"]
        )
    assert_tokens_equal(case, "returns", returns)
    assert_tokens_equal(case, "advantages", whitened_alone(config, advantages))


def _nemo(case: Golden) -> None:
    config = table("reinforce_plus_plus_baseline", "nemo")
    if case.params["kl_type"] != "k1":
        raise LeftOut("the same with its k3, which topic kl judges")
    kl = case.flat("log_probs") - case.flat("ref_log_probs")
    advantages = trajectory_advantages(
        config, case.tensor("rewards"), torch.tensor(case.inputs["group_index"])
    )
    tokens = token_advantages(config, advantages, case.segments, kl=kl, kl_coef=case.params["kl_coef"])
    assert_tokens_equal(case, "advantages", whitened_alone(config, tokens))


def _token_baseline(case: Golden) -> None:
    config = table(
        "otb",
        "verl",
        steps="trained" if case.params["estimator"] == "tir_otb" else "all",
        zero_tail=case.params["handle_zero_tail"],
    )
    weights = case.inputs["rollout_is_weights"]
    advantages, returns = token_baseline_advantages(
        config,
        case.flat("token_rewards"),
        case.flat("old_log_probs"),
        case.flat("sum_pi_squared"),
        case.segments,
        torch.tensor(case.inputs["group_index"]),
        weights=None if weights is None else case.flat("rollout_is_weights"),
        positions=places(case),
    )
    assert_tokens_equal(case, "returns", returns)
    assert_tokens_equal(case, "advantages", advantages)


REPLAYS: dict[str, Callable[[Golden], None]] = {
    "compute_reinforce_plus_plus_outcome_advantage": _reinforce_plus_plus,
    "compute_remax_outcome_advantage": _remax,
    "get_cumulative_returns": _discounted_returns,
    "compute_reinforce_return": _every_column,
    "chunked_discounted_returns": _every_column,
    "get_reinforce_plus_plus_returns": _slime,
    "compute_advantages_and_returns": _openrlhf_whole,
    "compute_advantage": _nemo,
    "compute_optimal_token_baseline_advantage": _token_baseline,
    "compute_multi_turn_optimal_token_baseline_advantage": _token_baseline,
}
