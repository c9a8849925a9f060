"""Advantages of one reward a trajectory, by hand. (Each comment names the mutation that the test catches.)"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.advantages import component_advantages, outcome_advantages, pass_at_k_advantages
from asyncrl.algorithms.advantages.estimators import summed_component_advantages, trajectory_advantages
from asyncrl.algorithms.advantages.groups import Groups
from tests.algorithms.advantage_tables import table

NAN = math.nan


def outcome(rewards, index=None, **options):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    index = torch.zeros(len(rewards), dtype=torch.int64) if index is None else torch.tensor(index)
    options = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in options.items()}
    return outcome_advantages(rewards, index, **options).tolist()


def test_leave_one_out_compares_with_the_mean_of_the_others():
    # Mutation: divide by n instead of n - 1 -> 0.75, -0.25.
    found = outcome([1.0, 0.0, 0.0, 0.0], baseline="leave_one_out", scale="none")
    assert found == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_leave_one_out_deviation_is_of_the_others_alone():
    # 1 against {0, 0}: deviation 0, so 1 undivided. 0 against {1, 0}: -0.5 / sqrt(0.5).
    # Mutations: the whole group's deviation; dividing by 0 + epsilon for the winner (1e6).
    options = {"baseline": "leave_one_out", "deviation": "leave_one_out", "epsilon_form": "where_positive"}
    found = outcome([1.0, 0.0, 0.0], **options, epsilon=0.0)
    assert found == pytest.approx([1.0, -math.sqrt(0.5), -math.sqrt(0.5)])
    # [0.2, 0.7, 1.0]: 0.2 against a mean of 0.85 and a deviation of 0.15 sqrt(2): -3.06.
    assert outcome([0.2, 0.7, 1.0], **options)[0] == pytest.approx(-0.65 / (0.15 * math.sqrt(2)), rel=1e-4)


def test_deviations_of_equal_rewards_are_exactly_zero():
    # Mutations: no test for equality, of the group or of the others: 1e-17, and the winner divided by it.
    groups = Groups.of(torch.zeros(8, dtype=torch.int64))
    for value in (0.1, 0.7, 1 / 3):
        assert groups.deviation(torch.full((8,), value, dtype=torch.float64), "sample").tolist() == [0.0] * 8
        sole_winner = torch.tensor([0.9] + [value] * 7, dtype=torch.float64)
        assert float(groups.deviation(sole_winner, "leave_one_out")[0]) == 0.0
        sole_loser = torch.tensor([-0.3] + [value] * 7, dtype=torch.float64)
        assert float(groups.deviation(sole_loser, "leave_one_out")[0]) == 0.0


def test_three_ways_to_keep_a_scale_from_zero():
    # Mutations: epsilon added to the floor; the floor added.
    rewards, std = [2.0, 0.0], math.sqrt(2.0)
    assert outcome(rewards, epsilon=0.5)[0] == pytest.approx(1 / (std + 0.5))
    assert outcome(rewards, epsilon=0.5, epsilon_form="floor")[0] == pytest.approx(1 / std)
    assert outcome(rewards, epsilon=5.0, epsilon_form="floor")[0] == pytest.approx(0.2)
    assert outcome(rewards, epsilon=0.5, deviation="population")[0] == pytest.approx(1 / 1.5)


def test_a_longer_answer_weighs_more_in_opos_baseline():
    # (3 * 1 + 1 * 0) / 4. Mutation: lengths left out -> 0.5.
    found = outcome([1.0, 0.0], baseline="length_weighted", scale="none", lengths=[3, 1])
    assert found == [0.25, -0.75]
    assert outcome([1.0, 0.0], baseline="length_weighted", scale="none", lengths=[0, 0]) == [1.0, 0.0]


def test_gpg_scales_by_the_share_of_rewards_that_are_not_zero():
    # One of four: times 4. Mutation: the share within the group -> times 2.
    found = outcome(
        [1.0, 0.0, 0.0, 0.0], [0, 0, 1, 1], scale="nonzero_share", scale_over="batch", epsilon=0.0
    )
    assert found == [2.0, -2.0, 0.0, 0.0]
    assert outcome([0.0, 0.0], scale="nonzero_share", scale_over="batch", epsilon=0.0) == [0.0, 0.0]


def test_maxrl_divides_by_the_success_rate():
    assert outcome([1.0, 0.0, 0.0, 0.0], scale="mean", epsilon=0.0) == [3.0, -1.0, -1.0, -1.0]


def test_remax_subtracts_the_greedy_reward_and_keeps_equal_ones():
    # Mutation: the rule of equal rewards applied to a baseline from outside.
    assert outcome([1.0, 1.0], baseline="greedy", scale="none", greedy_rewards=[0.0, 0.5]) == [1.0, 0.5]


def test_baseline_and_scale_may_be_the_batchs():
    rewards, index = [1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1]
    assert outcome(rewards, index, baseline_over="batch", scale="none") == [0.5, 0.5, -0.5, -0.5]
    # Equal within each group, and so 0, though the batch has a spread. Mutation: equality asked of the batch.
    assert outcome(rewards, index, scale_over="batch") == [0.0] * 4


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "length_weighted"])
@pytest.mark.parametrize("scale", ["std", "none", "mean"])
@pytest.mark.parametrize("value", [0.1, 0.7, 1e-300, 1e8 + 0.1, -0.3])
def test_equal_rewards_give_exactly_zero(baseline, scale, value):
    # Mutation: no test for equality; 0.1 * 7 / 7 is not 0.1.
    found = outcome([value] * 7, baseline=baseline, scale=scale, epsilon=1e-9, lengths=[1, 2, 3, 4, 5, 6, 7])
    assert found == [0.0] * 7


def test_a_group_of_one_gets_zero_or_its_reward():
    for baseline in ("mean", "leave_one_out"):
        assert outcome([0.7], baseline=baseline) == [0.0]
        assert outcome([0.7, NAN], baseline=baseline, group_of_one="reward") == [0.7, 0.0]


def test_nothing_at_all_is_nothing():
    assert outcome([]) == []
    assert outcome([NAN, NAN]) == [0.0, 0.0]


def test_an_infinite_reward_stays_in_its_group():
    # Mutation: statistics by a matrix of memberships, where 0 * inf is NaN.
    found = outcome([math.inf, 0.0, 1.0, 0.0], [0, 0, 1, 1], scale="none")
    assert found[2:] == [0.5, -0.5]


def test_only_a_sole_best_is_reinforced_by_pass_at_k():
    def passes(rewards, **options):
        rewards = torch.tensor(rewards, dtype=torch.float64)
        return pass_at_k_advantages(rewards, torch.zeros(len(rewards), dtype=torch.int64), **options).tolist()

    # Mutation: best minus mean (7/3).
    assert passes([4.0, 1.0, 0.0, NAN], divide_by_std=False) == [3.0, 0.0, 0.0, 0.0]
    assert passes([2.0, 1.0, 0.0], epsilon=1.0) == [0.5, 0.0, 0.0]
    assert passes([1.0, 1.0, 0.0]) == [0.0, 0.0, 0.0]  # mutation: a tie keeps its lead over the third
    assert passes([1.0]) == [0.0]


def test_components_are_scaled_alone_and_then_added():
    # A reward of 100s does not drown one of 1s. Mutation: one deviation for the sum.
    components = torch.tensor([[100.0, 0.0], [0.0, 1.0], [NAN, 1.0]], dtype=torch.float64)
    index = torch.tensor([0, 0])
    assert component_advantages(components, index).tolist() == pytest.approx([0.0, 0.0], abs=1e-5)
    weighted = component_advantages(components, index, weights=[1.0, 0.5, 7.0]).tolist()
    assert weighted == pytest.approx([0.5 * math.sqrt(0.5), -0.5 * math.sqrt(0.5)], rel=1e-5)


def test_whitening_over_trajectories_leaves_the_unscored_out():
    # Mutations: an unscored trajectory as an advantage of 0 in the moments; whitened to something else than 0.
    config = table("reinforce", whiten={"epsilon": 0.0}, whiten_over="trajectories")
    rewards, index = torch.tensor([5.0, NAN, 1.0, 3.0]), torch.zeros(4, dtype=torch.int64)
    assert trajectory_advantages(config, rewards, index).tolist() == [1.0, 0.0, -1.0, 0.0]
    components = torch.tensor([[5.0, NAN, 1.0, 3.0], [NAN, NAN, 1.0, 1.0]])
    config = table("gdpo", whiten={"epsilon": 0.0}, whiten_over="trajectories", epsilon=0.0)
    assert summed_component_advantages(config, components, index).tolist() == [1.0, 0.0, -1.0, 0.0]
    assert config.token_whitening is None


GROUPS = st.lists(
    st.lists(st.integers(-8, 8).map(lambda n: n / 4) | st.just(NAN), min_size=1, max_size=6),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=80)
@given(
    groups=GROUPS,
    baseline=st.sampled_from(["mean", "leave_one_out", "length_weighted"]),
    scale=st.sampled_from(["std", "mean", "none"]),
    deviation=st.sampled_from(["sample", "population", "leave_one_out"]),
    data=st.data(),
)
def test_advantages_depend_on_the_own_group_alone_in_any_order(groups, baseline, scale, deviation, data):
    # Mutations: a statistic over the batch; a scatter in the wrong order; NaN as a reward of 0.
    rows = [(reward, i) for i, group in enumerate(groups) for reward in group]
    order = data.draw(st.permutations(range(len(rows))))
    options = {"baseline": baseline, "scale": scale, "deviation": deviation, "epsilon": 0.1}
    lengths = [3 + 2 * k for k in range(len(rows))]
    together = outcome(
        [rows[k][0] for k in order],
        [rows[k][1] for k in order],
        lengths=[lengths[k] for k in order],
        epsilon_form="floor",
        **options,
    )
    found = dict(zip(order, together, strict=True))
    first = 0
    for group in groups:
        own = range(first, first + len(group))
        alone = outcome(group, lengths=[lengths[k] for k in own], epsilon_form="floor", **options)
        assert [found[k] for k in own] == pytest.approx(alone, rel=1e-9, abs=1e-9)
        first += len(group)


@settings(deadline=None, max_examples=50)
@given(values=st.lists(st.floats(-5, 5, width=16), min_size=1, max_size=7))
def test_leave_one_out_statistics_are_those_of_the_others(values):
    tensor = torch.tensor(values, dtype=torch.float64)
    groups = Groups.of(torch.zeros(len(values), dtype=torch.int64))
    means, deviations = groups.leave_one_out_mean(tensor), groups.deviation(tensor, "leave_one_out")
    for k in range(len(values)):
        others = torch.cat([tensor[:k], tensor[k + 1 :]])
        assert float(means[k]) == pytest.approx(float(others.mean()) if len(others) else values[k])
        expected = float(others.std()) if len(others) > 1 else 0.0
        assert float(deviations[k]) == pytest.approx(expected, abs=1e-6)
