"""overlong: what length and truncation do to rewards and losses."""

from __future__ import annotations

import numpy as np
import torch

from asyncrl.config.shaping import OverlongPenalty, Rescaling, ShapingConfig
from asyncrl.coordinator.shaping import overlong_penalty, shape_group
from asyncrl.types import Status, Trajectory, TrajectoryGroup
from tests.algorithms.goldens import Golden, as_tensor, assert_equal

PARAMS = {
    "areal": ("max_response_length", "overlong_tokens", "overlong_penalty_factor", "grow"),
    "nemo": ("max_response_length", "overlong_buffer_length", "overlong_buffer_penalty", "grow"),
    "openrlhf": ("max_new_tokens", "overlong_buffer_len", "penalty_factor", "cap"),
    "verl": ("max_resp_len", "overlong_buffer_len", "penalty_factor", "grow"),
    "trl": ("max_completion_len", "soft_punish_cache", None, "cap"),
}
"""Peer -> its names of max_tokens, buffer_tokens and factor (1 where it has none), and what it does beyond."""


def replay(case: Golden) -> None:
    name = case.id.split("/")[2]
    if name == "apply_overlong_filtering":
        masks = [np.array(mask, np.uint8) for mask in case.inputs["loss_masks"]]
        reasons = case.inputs["stop_reasons"]
        group = _group([_trajectory(0.0, mask, why) for mask, why in zip(masks, reasons, strict=True)])
        shaped = shape_group(group, ShapingConfig(truncated="mask"))
        assert [t.loss_mask.tolist() for t in shaped.trajectories] == case.outputs["loss_masks"]
    elif name == "scale_rewards":
        p = case.params
        config = Rescaling(
            source=(p["source_min"], p["source_max"]), target=(p["target_min"], p["target_max"])
        )
        _compare(case, "scaled_rewards", ShapingConfig(rescale=config))
    elif name == "stop_properly":
        _compare(case, "shaped_rewards", ShapingConfig(truncated_factor=case.params["coef"]))
    else:
        _overlong(case)


def _overlong(case: Golden) -> None:
    max_tokens, buffer, factor, beyond = PARAMS[case.peer]
    config = OverlongPenalty(
        max_tokens=case.params[max_tokens],
        buffer_tokens=case.params[buffer],
        factor=case.params[factor] if factor else 1.0,
        beyond=beyond,
    )
    penalties = [overlong_penalty(length, config) for length in case.inputs["response_lengths"]]
    if "rewards" in case.inputs:
        _compare(case, "shaped_rewards", ShapingConfig(overlong=config))
    if "penalty" in case.outputs:
        assert_equal(case, "penalty", -torch.tensor(penalties).to(case.dtype), case.output("penalty"))
    if "overlong" in case.outputs:
        assert [penalty > 0 for penalty in penalties] == case.outputs["overlong"]
    if "penalized" in case.outputs:
        assert sum(penalty > 0 for penalty in penalties) == case.outputs["penalized"]


def _compare(case: Golden, name: str, config: ShapingConfig) -> None:
    rewards = case.inputs["rewards"]
    lengths = case.inputs.get("response_lengths", [1] * len(rewards))
    reasons = ["length" if cut else "stop" for cut in case.inputs.get("truncated", [False] * len(rewards))]
    rows = zip(rewards, lengths, reasons, strict=True)
    group = _group([_trajectory(reward, np.ones(length, np.uint8), why) for reward, length, why in rows])
    shaped = [t.trained_reward for t in shape_group(group, config).trajectories]
    assert_equal(case, name, as_tensor(shaped, torch.float64), case.output(name))


def _trajectory(reward: float, loss_mask: np.ndarray, finish_reason: str) -> Trajectory:
    ints, floats = np.zeros(len(loss_mask), np.int32), np.zeros(len(loss_mask), np.float32)
    return Trajectory(ints, loss_mask, floats, ints, reward, Status.SCORED, finish_reason)


def _group(trajectories: list[Trajectory]) -> TrajectoryGroup:
    return TrajectoryGroup(0, 0, np.zeros(1, np.int32), trajectories)
