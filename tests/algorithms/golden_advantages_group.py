"""advantages_group: one reward a trajectory against its group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms.advantages import group_baselines, group_scales
from asyncrl.algorithms.advantages.estimators import (
    summed_component_advantages,
    token_advantages,
    trajectory_advantages,
)
from tests.algorithms.advantage_tables import assert_tokens_equal, table, whitened_alone
from tests.algorithms.goldens import Golden, LeftOut, as_tensor, assert_equal

TYPES = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "grpo_passk": "pass_at_k",
    "gpg": "gpg",
    "maxrl": "maxrl",
    "opo": "opo",
    "remax": "remax",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "raw_reward": "reinforce",
    "reinforce++": "reinforce_plus_plus",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
    "reinforce": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
}
"""The peers' names of an estimator -> our type."""


def replay(case: Golden) -> None:
    if case.peer == "openrlhf" and case.params["estimator"] == "rloo" and "single" in case.id:
        raise LeftOut("NaN for a group of one; ours is 0")
    if case.id == "verl/advantages_group/grpo_vectorized_norm1/float_noise_3x2/f64":
        raise LeftOut("float32 statistics: rewards that differ by 1e-16 are made equal; ours are float64")
    if "reward_components" in case.inputs:
        _gdpo(case)
    elif case.peer in ("verl", "skyrl", "openrlhf"):
        _over_tokens(case, *TABLES[case.peer](case))
    elif case.peer == "nemo":
        _nemo(case)
    else:
        assert_equal(case, "advantages", ROWS[case.peer](case), case.output("advantages"))


def group_index(case: Golden) -> Tensor:
    return torch.tensor(case.inputs["group_index"])


def _rows(case: Golden, config: Any) -> Tensor:
    return trajectory_advantages(config, case.tensor("rewards"), group_index(case))


def _over_tokens(case: Golden, config: Any, index: Tensor | None = None) -> None:
    segments = case.segments
    greedy = case.tensor("reward_baselines") if "reward_baselines" in case.inputs else None
    advantages = trajectory_advantages(
        config,
        case.tensor("rewards"),
        group_index(case) if index is None else index,
        lengths=segments.counts(),
        greedy_rewards=greedy,
    )
    if config.type != "outcome":
        assert_tokens_equal(case, "advantages", segments.spread(advantages))
        return
    places = torch.arange(case.mask.shape[1]).expand(case.mask.shape)[case.mask]
    tokens = token_advantages(config, advantages, segments, positions=places)
    assert_tokens_equal(case, "advantages", whitened_alone(config, tokens))
    if "returns" in case.outputs:
        returns = tokens if case.params["estimator"] in UNWHITENED_RETURNS else whitened_alone(config, tokens)
        if config.baseline == "greedy":
            returns = segments.spread(case.tensor("rewards"))
        assert_tokens_equal(case, "returns", returns)


UNWHITENED_RETURNS = ("reinforce", "reinforce_baseline", "reinforce_plus_plus", "reinforce++")
"""Estimators whose peers return what was whitened as well; the others return the advantages twice."""


def _verl(case: Golden) -> tuple[Any, ...]:
    estimator, options = case.params["estimator"], {}
    if "norm_adv_by_std_in_grpo" in case.params:
        by_std = case.params["norm_adv_by_std_in_grpo"]
        options = (
            {"divide_by_std": by_std} if estimator == "grpo_passk" else {} if by_std else {"scale": "none"}
        )
    if estimator == "rloo_vectorized":
        options = {"group_of_one": "zero"}
    if "gamma" in case.params:
        options = {"gamma": case.params["gamma"]}
    return (table(TYPES[estimator], "verl", **options),)


def _skyrl(case: Golden) -> tuple[Any, ...]:
    options = {} if case.params.get("grpo_norm_by_std", True) else {"scale": "none"}
    if "gamma" in case.params:
        options = {"gamma": case.params["gamma"]}
    return (table(TYPES[case.params["estimator"]], "skyrl", **options),)


def _openrlhf(case: Golden) -> tuple[Any, ...]:
    params = case.params
    options: dict[str, Any] = {"gamma": params.get("gamma", 1.0)}
    if params.get("no_std_norm"):
        options["whiten"] = {"deviation": "none"}
    if "original_index" in case.inputs:
        index = torch.tensor(case.inputs["original_index"]) // params["n_samples_per_prompt"]
        return table(TYPES[params["estimator"]], "openrlhf", **options), index
    return (table(TYPES[params["estimator"]], "openrlhf", **options),)


TABLES = {"verl": _verl, "skyrl": _skyrl, "openrlhf": _openrlhf}


def _nemo(case: Golden) -> None:
    params, index = case.params, group_index(case)
    if "estimator" not in params:
        rewards = case.tensor("rewards")
        leave_one_out = params["leave_one_out_baseline"]
        baseline = group_baselines(rewards, index, baseline="leave_one_out" if leave_one_out else "mean")
        deviation = "leave_one_out" if leave_one_out else "sample"
        assert_equal(case, "baseline", baseline, case.output("baseline"))
        std = group_scales(rewards, index, scale="std", deviation=deviation)
        assert_equal(case, "std", std, case.output("std"))
        return
    options: dict[str, Any] = {}
    type_ = TYPES[params["estimator"]]
    if type_ == "grpo":
        if not params["use_leave_one_out_baseline"]:
            options = {"baseline": "mean", "deviation": "sample"}
        if not params["normalize_rewards"]:
            options["scale"] = "none"
    elif type_ == "reinforce":
        options = {} if params["normalize_advantages"] else {"whiten": None}
    elif params["minus_baseline"]:
        type_ = "reinforce_plus_plus_baseline"
    _over_tokens(case, table(type_, "nemo", **options))


def _gdpo(case: Golden) -> None:
    params = case.params
    components = torch.stack(
        [
            as_tensor(case.inputs["reward_components"][name], case.dtype)
            for name in case.inputs["component_order"]
        ]
    )
    config = table("gdpo", "nemo" if case.peer == "nemo" else "verl")
    advantages = summed_component_advantages(config, components, group_index(case), params["weights"])
    tokens = case.segments.spread(advantages)
    assert_tokens_equal(case, "advantages", whitened_alone(config, tokens))


def _areal(case: Golden) -> Tensor:
    params = case.params
    return _rows(
        case,
        table(
            "rloo" if params["mean_leave1out"] else "grpo",
            "areal",
            baseline_over=params["mean_level"],
            scale="none" if params["std_level"] is None else "std",
            scale_over=params["std_level"] or "group",
            deviation="sample" if params["std_unbiased"] else "population",
        ),
    )


def _roll(case: Golden) -> Tensor:
    mean, std = case.params["norm_mean_type"], case.params["norm_std_type"]
    return _rows(
        case,
        table(
            "outcome",
            "roll",
            baseline="none" if mean is None else "mean",
            baseline_over=mean or "group",
            scale="none" if std is None else "std",
            scale_over=std or "group",
        ),
    )


def _trl(case: Golden) -> Tensor:
    params = case.params
    if "_score_group" in case.function:
        if "rewards_per_func" not in case.inputs:
            return _rows(case, table("grpo", "trl_async"))
        each = torch.tensor(
            [[float("nan") if r is None else r for r in of] for of in case.inputs["rewards_per_func"]]
        )
        total = each.nansum(0).where(~each.isnan().all(0), torch.nan).to(case.dtype)
        return trajectory_advantages(
            table("grpo", "trl_async"), total, torch.zeros(len(total), dtype=torch.int64)
        )
    if "normalize_advantages" in params:
        return _rloo_of_trl(case)
    options = {"none": {"scale": "none"}, "group": {}, "batch": {"scale_over": "batch"}}[
        params["scale_rewards"]
    ]
    if "rewards_per_func" not in case.inputs:
        return _rows(case, table("grpo", "trl", **options))
    each = case.tensor("rewards_per_func").T
    if params["multi_objective_aggregation"] == "normalize_then_sum":
        return summed_component_advantages(
            table("gdpo", "trl"), each, group_index(case), params["reward_weights"]
        )
    weights = torch.tensor(params["reward_weights"])[:, None]
    total = (each * weights).nansum(0).where(~each.isnan().all(0), torch.nan)
    return trajectory_advantages(table("grpo", "trl", **options), total, group_index(case))


def _rloo_of_trl(case: Golden) -> Tensor:
    whitening = {"epsilon": case.params["epsilon"], "epsilon_in": "std"}
    return _rows(
        case, table("rloo", "trl", whiten=whitening if case.params["normalize_advantages"] else None)
    )


def _open_instruct(case: Golden) -> Tensor:
    centred = case.params["advantage_normalization_type"] == "centered"
    return _rows(case, table("dr_grpo" if centred else "grpo", "open_instruct"))


def _prime_rl(case: Golden) -> Tensor:
    if case.params["length_penalty"]:
        raise LeftOut("its reward shaping by lengths among the correct answers")
    return _rows(case, table("maxrl" if "max_rl" in case.id else "grpo", "prime_rl"))


ROWS = {
    "areal": _areal,
    "roll": _roll,
    "trl": _trl,
    "open_instruct": _open_instruct,
    "prime_rl": _prime_rl,
    "megatron_rl": lambda case: _rows(case, table("grpo", "megatron_rl")),
    "torchrl": lambda case: _rows(case, table("grpo", "torchrl")),
}
