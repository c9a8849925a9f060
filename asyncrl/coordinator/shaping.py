"""Before a group enters a batch: its rewards are shaped, and it is asked whether it teaches anything.

Pure functions of one group, without torch: the coordinator runs them as a group arrives, so that what takes a
rejected group's place can start at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from asyncrl.config import AlgorithmConfig
from asyncrl.config.shaping import FilterConfig, OverlongPenalty, Rescaling, ShapingConfig
from asyncrl.types import Trajectory, TrajectoryGroup


class Admitted(NamedTuple):
    """A group as it enters the ledger."""

    group: TrajectoryGroup
    is_filtered: bool
    """The recipe does not train it."""


def admit(group: TrajectoryGroup, algorithm: AlgorithmConfig, *, num_greedy: int) -> Admitted:
    """The recipe's `filter` and `shape`, in the order in which it names them.

    The filter reads the reward before shaping, whatever the order: a length penalty would make every group look
    informative. Greedy rollouts, the last `num_greedy`, never train; they are shaped like those that they are the
    baseline of, and where one has no reward there is nothing to compare the group with: none of it trains.
    """
    num_sampled = len(group.trajectories) - num_greedy
    sampled = replace(group, trajectories=group.trajectories[:num_sampled])
    is_filtered = "filter" in algorithm.stages and is_dropped(sampled, algorithm.filter)
    if "shape" in algorithm.stages and algorithm.shaping != ShapingConfig():
        group = shape_group(group, algorithm.shaping)
    if num_greedy:
        has_baseline = all(t.reward is not None for t in group.trajectories[num_sampled:])
        first_untrained = num_sampled if has_baseline else 0
        untrained = [_untrained(t) for t in group.trajectories[first_untrained:]]
        group = replace(group, trajectories=[*group.trajectories[:first_untrained], *untrained])
    return Admitted(group, is_filtered)


def _untrained(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, loss_mask=np.zeros_like(trajectory.loss_mask))


def shape_group(group: TrajectoryGroup, config: ShapingConfig) -> TrajectoryGroup:
    """The group with `shaped_reward` and loss masks; `reward` stays, and the arrays of `group` are not written to.

    Ask `is_dropped` first: it reads the rewards before shaping, since a length penalty would make every group
    look informative.
    """
    return replace(group, trajectories=[_shaped(trajectory, config) for trajectory in group.trajectories])


def _shaped(trajectory: Trajectory, config: ShapingConfig) -> Trajectory:
    truncated = trajectory.finish_reason != "stop"
    reward, loss_mask = trajectory.reward, trajectory.loss_mask
    if reward is not None:
        if config.rescale is not None:
            reward = rescaled(reward, config.rescale)
        if truncated and config.truncated_factor is not None:
            reward *= config.truncated_factor
        if config.overlong is not None:
            reward -= overlong_penalty(len(trajectory), config.overlong)
    if truncated and config.truncated == "mask":
        loss_mask = np.zeros_like(loss_mask)
    return replace(trajectory, shaped_reward=reward, loss_mask=loss_mask)


def overlong_penalty(num_tokens: int, config: OverlongPenalty) -> float:
    """What a completion of that length loses, at least 0. DAPO: arXiv:2503.14476."""
    assert config.max_tokens is not None, "resolved with the rollout's longest completion"
    assert config.buffer_tokens is not None
    over = num_tokens - (config.max_tokens - config.buffer_tokens)
    share = max(over / config.buffer_tokens, 0.0)
    return config.factor * (share if config.beyond == "grow" else min(share, 1.0))


def rescaled(reward: float, config: Rescaling) -> float:
    """The reward's place in `source` as the same place in `target`."""
    (low, high), (new_low, new_high) = config.source, config.target
    share = (min(max(reward, low), high) - low) / (high - low)
    return new_low + share * (new_high - new_low)


def is_dropped(group: TrajectoryGroup, config: FilterConfig) -> bool:
    """Whether the group is consumed without being trained; ask before `shape_group`."""
    return not is_informative(metric_of(group, config.metric), config)


def metric_of(group: TrajectoryGroup, label: str | None) -> list[float]:
    """The metric of each trajectory that has it: the reward, or one of its components before weights."""
    if label is None:
        return [t.reward for t in group.trajectories if t.reward is not None]
    return [t.reward_components[label] for t in group.trajectories if label in t.reward_components]


def is_informative(metric: Sequence[float], config: FilterConfig) -> bool:
    """Whether the filter keeps a group with these values, one a scored trajectory; no value at all is not kept."""
    if config.keep == "all":
        return True
    if len(metric) == 0:
        return False
    if config.keep == "mean_between":
        low, high = config.between
        return low < float(np.mean(metric)) < high
    if len(metric) == 1:
        return config.group_of_one == "keep"
    return spread(metric, config.measure) > config.tolerance


def spread(metric: Sequence[float], measure: Literal["range", "sample_std", "population_std"]) -> float:
    """How far the values, two or more, differ."""
    if measure == "range":
        return max(metric) - min(metric)
    return float(np.std(metric, ddof=1 if measure == "sample_std" else 0))
