"""dynamic_sampling: which groups of rewards are trained. (open-instruct's percent_solved is a mean that nothing of ours
reads, and is not compared.)"""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.algorithms.advantages import group_scales
from asyncrl.algorithms.advantages.estimators import trajectory_advantages
from asyncrl.config.shaping import FilterConfig
from asyncrl.coordinator.shaping import is_informative
from tests.algorithms.advantage_tables import table
from tests.algorithms.goldens import Golden, LeftOut, assert_equal


def replay(case: Golden) -> None:
    if case.peer == "torchrl":
        _torchrl(case)
    elif case.peer == "nemo":
        _nemo(case)
    elif "returned_uids" in case.outputs:
        kept, target = _kept(case, FilterConfig(keep="spread")), case.params["train_batch_size"]
        assert case.outputs["keep_sampling"] == (len(kept) < target)
        assert (case.outputs["returned_uids"] or case.outputs["collected"]) == kept[:target]
    else:
        kept = _kept(case, _config(case))
        assert kept == case.outputs["kept"]
        assert [name for name in case.inputs["groups"] if name not in kept] == case.outputs["dropped"]


def _config(case: Golden) -> FilterConfig:
    if case.peer == "openrlhf":
        low, high = case.params["dynamic_filtering_range"]
        keep = "mean_between" if case.params["dynamic_filtering"] else "all"
        return FilterConfig(keep=keep, between=(float(low), float(high)))
    if case.peer == "slime":
        return FilterConfig(keep="spread", measure="sample_std", tolerance=1e-6)
    if case.peer == "open_instruct":
        return FilterConfig(keep="spread", measure="population_std")
    return FilterConfig(keep="spread", tolerance=case.params["tol"], group_of_one="keep")


def _kept(case: Golden, config: FilterConfig) -> list[str]:
    return [name for name, rewards in _groups(case).items() if is_informative(rewards, config)]


def _groups(case: Golden) -> dict[str, list[float]]:
    return {
        name: torch.tensor(rewards, dtype=case.dtype).tolist()
        for name, rewards in case.inputs["groups"].items()
    }


def _nemo(case: Golden) -> None:
    """The peer filters rows by the deviation at each: the same as groups where it is the whole group's."""
    if case.params["leave_one_out_std"]:
        raise LeftOut("leave-one-out deviations drop the only winner, or loser, of a good group")
    names, size = list(case.inputs["groups"]), case.params["num_generations_per_prompt"]
    rewards = torch.tensor([_groups(case)[name] for name in names], dtype=case.dtype).flatten()
    std = group_scales(rewards, torch.arange(len(names)).repeat_interleave(size), scale="std")
    assert_equal(case, "std", std, case.output("std"))
    kept, target = _kept(case, FilterConfig(keep="spread")), case.params["num_prompts_per_step"]
    assert [name for name in kept[:target] for _ in range(size)] == case.outputs["row_group"]
    assert case.outputs["is_batch_complete"] == (len(kept) >= target)
    metrics: dict[str, Any] = case.outputs["metrics"]
    if metrics:
        assert metrics["dynamic_sampling_num_discarded_valid_samples"] == (len(kept) - target) * size


def _torchrl(case: Golden) -> None:
    index, rewards = torch.tensor(case.inputs["group_index"]), case.tensor("rewards")
    low, high = case.params["keep_return_bounds"]
    config = FilterConfig(keep="mean_between", between=(low, high))
    advantages = trajectory_advantages(table("grpo", "torchrl"), rewards, index)
    for group, (kept, expected) in enumerate(
        zip(case.outputs["group_kept"], case.outputs["advantages"], strict=True)
    ):
        assert is_informative(rewards[index == group].tolist(), config) == kept
        if kept:
            found = advantages[index == group]
            assert_equal(case, "advantages", found, torch.tensor(expected, dtype=case.dtype))
