"""Advantages of single tokens, by hand, and against plain loops. (Comments name the mutations that tests catch.)"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.advantages import (
    generalised_advantages,
    length_adaptive_lambda,
    minus_kl,
    optimal_token_baselines,
    rewards_to_go,
    token_rewards,
)
from asyncrl.algorithms.advantages.recurrence import backward_recurrence
from asyncrl.algorithms.segments import Segments


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def test_the_reward_is_at_the_last_trained_token():
    # Mutations: at the first; a trajectory without tokens shifting the next one's reward.
    segments = Segments.of_counts([2, 0, 1])
    assert token_rewards(f64([1.0, 5.0, -3.0]), segments).tolist() == [0.0, 1.0, -3.0]
    assert token_rewards(f64([1.0, 5.0, -3.0]), segments, clip=(-1.0, 0.5)).tolist() == [0.0, 0.5, -1.0]
    assert token_rewards(f64([1.0]), Segments.of_counts([0])).tolist() == []


def test_kl_is_subtracted_at_every_token_and_not_clipped():
    segments, kl = Segments.of_counts([2]), f64([10.0, -1.0])
    found = token_rewards(f64([3.0]), segments, kl=kl, kl_coef=0.5, clip=(-1.0, 1.0))
    assert found.tolist() == [-5.0, 1.5]  # mutations: plus for minus; the clip after the penalty
    assert minus_kl(f64([1.0]), f64([math.inf]), 0.0).tolist() == [1.0]  # mutation: 0 * inf


def test_rewards_to_go_over_an_observation():
    # Tokens at places 0, 1, then an observation of two tokens, then 4. Reward 8 at the end, gamma 1/2.
    segments, positions = Segments.of_counts([3]), torch.tensor([0, 1, 4])

    def to_go(gaps):
        return rewards_to_go(
            f64([0.0, 1.0, 8.0]), segments, gamma=0.5, gaps=gaps, positions=positions
        ).tolist()

    assert to_go("carry") == [2.5, 5.0, 8.0]
    assert to_go("discount") == [1.0, 2.0, 8.0]  # mutation: one factor for the gap, whatever its length
    assert to_go("cut") == [0.5, 1.0, 8.0]
    with pytest.raises(ValueError, match="positions"):
        rewards_to_go(f64([1.0]), Segments.of_counts([1]), gaps="cut")


def test_gae_by_hand():
    # gamma 1/2, lambda 1/2: delta_2 = 1 - 0.5, delta_1 = 0.25 - 1, delta_0 = 0.5 - 0.
    segments = Segments.of_counts([3, 1])
    found = generalised_advantages(f64([0, 0, 1, 2]), f64([0, 1, 0.5, 9]), segments, gamma=0.5, lam=0.5)
    # Mutations: V' of the next trajectory (9) at the third token; gamma for gamma * lambda.
    assert found.tolist() == [0.5 - 0.625 / 4, -0.625, 0.5, -7.0]


def test_lambda_one_is_returns_minus_values_and_lambda_zero_the_td_error():
    segments, rewards, values = Segments.of_counts([3]), f64([1, 2, 4]), f64([10, 20, 30])
    assert generalised_advantages(rewards, values, segments).tolist() == [-3.0, -14.0, -26.0]
    assert generalised_advantages(rewards, values, segments, lam=0.0).tolist() == [11.0, 12.0, -26.0]


def test_a_cut_answer_is_bootstrapped():
    segments = Segments.of_counts([1, 1])
    found = generalised_advantages(
        f64([0.0, 0.0]), f64([0.0, 0.0]), segments, gamma=0.5, bootstrap_values=f64([4.0, 0.0])
    )
    assert found.tolist() == [2.0, 0.0]


def test_an_observation_is_nothing_or_states_of_value_zero_or_the_end():
    # One observation token between two trained ones; V = 1 and 2, reward 4 at the end.
    def gae(gaps):
        return generalised_advantages(
            f64([0, 4]),
            f64([1, 2]),
            Segments.of_counts([2]),
            gamma=0.5,
            lam=0.5,
            gaps=gaps,
            positions=torch.tensor([0, 2]),
        ).tolist()

    assert gae("carry") == [0.5 * 2 - 1 + 0.25 * 2, 2.0]
    # Through the state of value 0: A_obs = 0.5 * 2 + 0.25 * 2 = 1.5, so A_0 = -1 + 0.25 * 1.5.
    assert gae("discount") == [-0.625, 2.0]
    assert gae("cut") == [-1.0, 2.0]


def test_lambda_grows_with_length():
    assert length_adaptive_lambda(Segments.of_counts([1, 20, 0]), 0.5).tolist() == [0.0, 0.9, 0.0]
    lam = f64([0.0, 1.0])
    found = generalised_advantages(f64([0, 1, 0, 1]), f64([0, 0, 0, 0]), Segments.of_counts([2, 2]), lam=lam)
    assert found.tolist() == [0.0, 1.0, 1.0, 1.0]  # mutation: lambda of the wrong trajectory


def test_no_gradient_reaches_the_critic_through_advantages():
    values = f64([1.0, 2.0]).requires_grad_()
    found = generalised_advantages(f64([0.0, 1.0]), values, Segments.of_counts([2]))
    assert not found.requires_grad


def test_token_baseline_by_hand():
    # pi = 1/2 and sum pi^2 = 1/2 everywhere: each token moves by 1/2, W = 0.5, 1, 1.5.
    # Lengths 2 and 3 of one group, returns 1 and 3: equal weights at a step, so 2, 2, and the own 3 at the tail.
    segments, index = Segments.of_counts([2, 3]), torch.tensor([0, 0])
    returns, half = f64([1, 1, 3, 3, 3]), torch.full((5,), 0.5, dtype=torch.float64)

    def baselines(**options):
        return optimal_token_baselines(
            returns, half.log(), half, segments, index, epsilon=0.0, **options
        ).tolist()

    assert baselines() == pytest.approx([2, 2, 2, 2, 3])
    assert baselines(zero_tail=True) == pytest.approx([2, 2, 2, 2, 0])
    # Weights 1 and 3 enter squared: (1 + 9 * 3) / 10. Mutation: not squared -> 2.5.
    weights = f64([1, 1, 3, 3, 3])
    assert baselines(weights=weights)[0] == pytest.approx(2.8)
    # Aligned by place: the short one's second token is alone at place 5, and so is the long one's at 1.
    places = torch.tensor([0, 5, 0, 1, 2])
    assert baselines(positions=places) == pytest.approx([2, 1, 2, 3, 3])
    # The short one's token at place 5 is no tail of the longest. Mutation: the tail of every trajectory.
    assert baselines(positions=places, zero_tail=True) == pytest.approx([2, 1, 2, 3, 0])
    # A sure token (pi = 1) moves nothing. Mutation: 1 - pi for 1 - 2 pi.
    sure, squares = f64([0.5, 0.5, 1, 1, 1]), f64([0.5, 0.5, 1, 1, 1])
    found = optimal_token_baselines(returns, sure.log(), squares, segments, index, epsilon=1e-9)
    assert found.tolist() == pytest.approx([1, 1, 1, 1, 0], abs=1e-6)
    # A group of one has none. Mutation: its own return -> advantage 0.
    lone = optimal_token_baselines(returns, half.log(), half, segments, torch.tensor([0, 1]))
    assert lone.tolist() == [0.0] * 5


def test_a_tie_for_the_longest_has_no_tail():
    segments, index = Segments.of_counts([2, 2, 1]), torch.tensor([0, 0, 0])
    half = torch.full((5,), 0.5, dtype=torch.float64)
    found = optimal_token_baselines(f64([1, 1, 3, 3, 2]), half.log(), half, segments, index, zero_tail=True)
    assert found.tolist() == pytest.approx([2.0] * 5, abs=1e-6)  # mutation: the third longest for the second


COUNTS = st.lists(st.integers(0, 9), min_size=0, max_size=6)


def by_loop(values, decays, segments):
    result = values.clone()
    for t in reversed(range(len(values) - 1)):
        if segments.index[t] == segments.index[t + 1]:
            result[t] = values[t] + decays[t] * result[t + 1]
    return result


@settings(deadline=None, max_examples=80)
@given(counts=COUNTS, seed=st.integers(0, 99))
def test_the_recurrence_is_that_of_a_loop(counts, seed):
    # Mutations: the last of the doubled distances left out; sums over the border of a trajectory.
    generator = torch.Generator().manual_seed(seed)
    segments = Segments.of_counts(counts)
    values = torch.randn(sum(counts), generator=generator, dtype=torch.float64)
    decays = torch.rand(sum(counts), generator=generator, dtype=torch.float64)
    found = backward_recurrence(values, decays, segments)
    torch.testing.assert_close(found, by_loop(values, decays, segments))


@settings(deadline=None, max_examples=50)
@given(counts=st.lists(st.integers(0, 9), min_size=2, max_size=5), seed=st.integers(0, 99), data=st.data())
def test_a_trajectory_is_bitwise_the_same_whatever_is_beside_it(counts, seed, data):
    # Mutations: a cumulative sum over the whole batch; 0 * inf at the border.
    generator = torch.Generator().manual_seed(seed)
    segments = Segments.of_counts(counts)
    rewards, values = torch.randn(2, sum(counts), generator=generator)
    spoilt = data.draw(st.integers(0, len(counts) - 1))
    there = segments.index == spoilt
    rewards = rewards.where(~there, math.inf)
    values = values.where(~there, math.nan)
    together = generalised_advantages(rewards, values, segments, gamma=0.9, lam=0.8)
    for k, count in enumerate(counts):
        if k != spoilt:
            own = segments.index == k
            alone = generalised_advantages(
                rewards[own], values[own], Segments.of_counts([count]), gamma=0.9, lam=0.8
            )
            assert torch.equal(together[own], alone)
