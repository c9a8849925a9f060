"""Shaped rewards and the filter of groups. (Comments name the mutations that tests catch.)"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from asyncrl.config.shaping import FilterConfig, OverlongPenalty, Rescaling, ShapingConfig
from asyncrl.coordinator.shaping import is_dropped, is_informative, overlong_penalty, rescaled, shape_group
from asyncrl.types import Status, Trajectory, TrajectoryGroup

DAPO = OverlongPenalty(max_tokens=10, buffer_tokens=4)


def trajectory(reward, length=2, finish_reason="stop", **components):
    ints, ones = np.zeros(length, np.int32), np.ones(length, np.uint8)
    status = Status.REWARD_FAILED if reward is None else Status.SCORED
    return Trajectory(
        ints, ones, ints.astype(np.float32), ints, reward, status, finish_reason, reward_components=components
    )


def group(*trajectories):
    return TrajectoryGroup(0, 0, np.zeros(1, np.int32), list(trajectories))


def test_the_penalty_grows_over_the_buffer_and_stops_at_the_maximum():
    # Mutations: the buffer measured from the maximum on; the factor applied before the cap.
    assert [overlong_penalty(n, DAPO) for n in (1, 6, 7, 8, 10, 14)] == [0.0, 0.0, 0.25, 0.5, 1.0, 1.0]
    growing = OverlongPenalty(max_tokens=10, buffer_tokens=4, factor=3.0, beyond="grow")
    assert [overlong_penalty(n, growing) for n in (8, 10, 14)] == [1.5, 3.0, 6.0]


def test_rewards_are_rescaled_then_halved_if_truncated_then_punished():
    # Mutation: another order. 1 -> 1 -> 0.5 -> -0.5.
    config = ShapingConfig(rescale=Rescaling(), truncated_factor=0.5, overlong=DAPO)
    shaped = shape_group(group(trajectory(1.0, 10, "length"), trajectory(0.0), trajectory(None)), config)
    assert [t.trained_reward for t in shaped.trajectories] == [-0.5, -1.0, None]
    assert rescaled(5.0, Rescaling(source=(0.0, 2.0), target=(1.0, 3.0))) == 3.0


def test_masked_answers_keep_their_reward_and_the_arrays_given_are_not_written_to():
    original = group(trajectory(1.0, 3, "length"), trajectory(0.0, 2), trajectory(0.0, 2, "abort"))
    shaped = shape_group(original, ShapingConfig(truncated="mask"))
    assert [t.loss_mask.sum() for t in shaped.trajectories] == [0, 2, 0]
    assert [t.trained_reward for t in shaped.trajectories] == [1.0, 0.0, 0.0]
    assert [t.loss_mask.sum() for t in original.trajectories] == [3, 2, 2]


def test_the_filter_reads_the_metric_and_not_the_reward_with_a_length_penalty():
    # Mutation: the filter after shaping, where lengths 10 and 2 make two right answers differ.
    both_right = group(trajectory(1.0, 10, acc=1.0, fmt=0.0), trajectory(1.0, 2, acc=1.0, fmt=1.0))
    config = FilterConfig(keep="spread")
    assert is_dropped(both_right, config)
    shaped = shape_group(both_right, ShapingConfig(overlong=DAPO))
    assert len({t.trained_reward for t in shaped.trajectories}) == 2
    assert is_dropped(shaped, config)
    assert is_dropped(both_right, FilterConfig(keep="spread", metric="acc"))
    assert not is_dropped(both_right, FilterConfig(keep="spread", metric="fmt"))


def test_equal_fractions_have_no_spread_and_a_range_is_exact():
    # Mutation: numpy's deviation, which is 1e-17 here.
    assert not is_informative([0.1] * 3, FilterConfig(keep="spread"))
    assert is_informative([0.1] * 3, FilterConfig(keep="spread", measure="population_std"))
    assert is_informative([0.1 + 0.2, 0.3], FilterConfig(keep="spread"))
    assert not is_informative([0.1 + 0.2, 0.3], FilterConfig(keep="spread", tolerance=1e-6))


def test_an_open_interval_for_the_mean():
    config = FilterConfig(keep="mean_between", between=(0.0, 1.0))
    assert [is_informative(m, config) for m in ([0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.5])] == [0, 0, 1, 1]


def test_few_values_or_none():
    assert not is_informative([0.5], FilterConfig(keep="spread"))
    assert is_informative([0.5], FilterConfig(keep="spread", group_of_one="keep"))
    assert not is_informative([], FilterConfig(keep="spread"))
    assert is_informative([], FilterConfig())
    assert is_dropped(group(trajectory(None), trajectory(1.0)), FilterConfig(keep="spread"))


@given(metric=st.lists(st.floats(-3, 3), min_size=2, max_size=6), data=st.data())
def test_the_order_of_trajectories_does_not_matter(metric, data):
    shuffled = data.draw(st.permutations(metric))
    config = FilterConfig(keep="spread")
    assert is_informative(metric, config) == is_informative(shuffled, config) == (len(set(metric)) > 1)


def test_impossible_bounds_are_refused():
    with pytest.raises(ValidationError, match="at most max_tokens"):
        OverlongPenalty(max_tokens=4, buffer_tokens=5)
    with pytest.raises(ValidationError, match="not empty"):
        Rescaling(source=(1.0, 1.0))
