"""GRPO by hand: advantages, clipping, importance weights, sums."""

from __future__ import annotations

import math

import pytest
import torch
from asyncrl.algorithms.recipe import TokenBatch
from asyncrl.algorithms.registry import build_recipe
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.advantages import group_advantages
from asyncrl.algorithms.correction import importance_weights
from asyncrl.algorithms.losses import bounded_exp, clipped_policy_loss
from asyncrl.config import GrpoConfig, NoCorrection, TruncatedImportanceSampling

UNSCORED = math.nan


def advantages(rewards, group_index=None, scale="std"):
    index = torch.tensor(group_index or [0] * len(rewards), dtype=torch.int64)
    recipe = build_recipe(GrpoConfig(scale=scale))
    return recipe.advantages(torch.tensor(rewards, dtype=torch.float64), index).tolist()


@pytest.mark.parametrize(
    "rewards", [[1.0] * 4, [0.0] * 4, [0.1] * 7, [float(torch.tensor(0.1))] * 7, [1e-300] * 3]
)
def test_equal_rewards_give_exactly_zero(rewards):
    # Mutation caught: no test for equality. 0.1 * 7 / 7 is not 0.1, and dividing by a tiny deviation shows it.
    assert advantages(rewards) == [0.0] * len(rewards)
    assert advantages(rewards, scale="none") == [0.0] * len(rewards)


def test_advantages_use_the_sample_deviation():
    # Mutation caught: the population deviation would give 1.732, -0.577; leave-one-out 1, -1/3.
    assert advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=5e-6)
    assert advantages([1.0, 0.0, 0.0, 0.0], scale="none") == [0.75, -0.25, -0.25, -0.25]


def test_a_group_with_fewer_than_two_scored_trajectories_gives_zero():
    # Mutation caught: n - 1 = 0 gives NaN, or the reward itself.
    assert advantages([0.7]) == [0.0]
    assert advantages([0.7, UNSCORED, UNSCORED]) == [0.0, 0.0, 0.0]
    assert advantages([UNSCORED, UNSCORED]) == [0.0, 0.0]
    assert advantages([]) == []


def test_an_unscored_trajectory_is_no_zero():
    # Mutation caught: NaN read as reward 0, which would make the mean 1/3 and not 1/2.
    assert advantages([1.0, UNSCORED, 0.0], scale="none") == [0.5, 0.0, -0.5]
    assert advantages([1.0, UNSCORED, 0.0]) == pytest.approx([0.707106, 0.0, -0.707106], abs=2e-6)


def test_groups_are_told_apart_by_index_and_not_by_position():
    # Mutation caught: cutting the batch into equal runs.
    mixed = advantages([1.0, 5.0, 0.0, 7.0, 6.0], [0, 1, 0, 1, 1], scale="none")
    assert mixed == [0.5, -1.0, -0.5, 1.0, 0.0]


@settings(deadline=None, max_examples=60)
@given(
    groups=st.lists(
        st.lists(st.floats(-100, 100, width=32) | st.just(UNSCORED), min_size=1, max_size=6),
        min_size=1,
        max_size=5,
    ),
    data=st.data(),
)
def test_advantages_follow_their_trajectory_in_any_order(groups, data):
    # Mutation caught: statistics over the batch, or a scatter in the wrong order.
    rows = [(reward, i) for i, group in enumerate(groups) for reward in group]
    rewards, index = [r for r, _ in rows], [i for _, i in rows]
    found = advantages(rewards, index)
    order = data.draw(st.permutations(range(len(rows))))
    permuted = advantages([rewards[i] for i in order], [index[i] for i in order])
    assert permuted == pytest.approx([found[i] for i in order], rel=1e-4, abs=1e-4)
    for i, reward in enumerate(rewards):
        assert math.isfinite(found[i])
        assert found[i] == 0.0 or not math.isnan(reward)
    for i in range(len(groups)):
        assert sum(a for a, j in zip(found, index, strict=True) if j == i) == pytest.approx(0.0, abs=1e-3)


def clipped(ratios, advantage, low=0.2, high=0.3):
    """(losses, clipped flags, gradients with respect to the log-probs)."""
    learner = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    losses, flags = clipped_policy_loss(
        learner, torch.zeros_like(learner), torch.tensor(advantage), clip_low=low, clip_high=high
    )
    losses.sum().backward()
    assert learner.grad is not None
    return losses.tolist(), flags.tolist(), learner.grad.tolist()


def test_clip_stops_the_gradient_on_the_side_that_would_go_on():
    # Mutations caught: min for max, clip_low and clip_high swapped, clipping whatever the advantage's sign.
    ratios = [0.5, 0.9, 1.2, 1.5]
    losses, flags, gradients = clipped(ratios, 2.0)
    assert losses == pytest.approx([-1.0, -1.8, -2.4, -2.6])
    assert flags == [False, False, False, True]
    assert gradients == pytest.approx([-1.0, -1.8, -2.4, 0.0])
    losses, flags, gradients = clipped(ratios, -2.0)
    assert losses == pytest.approx([1.6, 1.8, 2.4, 3.0])
    assert flags == [True, False, False, False]
    assert gradients == pytest.approx([0.0, 1.8, 2.4, 3.0])


def test_a_huge_log_ratio_gives_neither_inf_nor_nan_but_nan_stays_nan():
    # Mutations caught: exp without the cut (inf * 0 is NaN in the gradient); nan_to_num.
    log_ratio = torch.tensor([500.0, -500.0, math.inf, math.nan], requires_grad=True)
    ratio = bounded_exp(log_ratio)
    assert ratio[:3].tolist() == pytest.approx([math.exp(20), math.exp(-20), math.exp(20)])
    assert math.isnan(float(ratio[3].detach()))
    (ratio[:3].sum() * 0.0).backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_importance_weights_are_truncated_and_carry_no_gradient():
    # Mutations caught: the ratio upside down; the cap on the wrong side; a gradient through the weight.
    proximal = torch.tensor([0.5, 1.0, 4.0]).log().requires_grad_()
    weights, truncated = importance_weights(proximal, torch.zeros(3), TruncatedImportanceSampling(cap=2.0))
    assert weights.tolist() == pytest.approx([0.5, 1.0, 2.0])
    assert truncated.tolist() == [False, False, True]
    assert not weights.requires_grad
    weights, truncated = importance_weights(proximal, torch.zeros(3), NoCorrection())
    assert weights.tolist() == [1.0, 1.0, 1.0]
    assert not truncated.any()


def token_batch(learner, proximal, rollout, advantage, dtype=torch.float64):
    rows = [torch.tensor(values, dtype=dtype) for values in (learner, proximal, rollout, advantage)]
    rows[0].requires_grad_()
    return TokenBatch(*rows, entropy=torch.full_like(rows[1], 0.5))


def test_loss_and_metrics_by_hand():
    # Ratios 1.5 and 1 against the proximal policy, weights 0.5 and 2 (3 truncated); advantages 1 and -1.
    # Mutations caught: weights or mismatch from the learner instead of the proximal policy; a mean for a sum.
    log = math.log
    batch = token_batch([log(0.3), log(0.6)], [log(0.2), log(0.6)], [log(0.4), log(0.2)], [1.0, -1.0])
    result = build_recipe(GrpoConfig()).loss(batch)
    assert float(result.loss.detach()) == pytest.approx(-1.2 * 0.5 + 1.0 * 2.0)
    result.loss.backward()
    assert batch.learner_logprobs.grad is not None
    assert batch.learner_logprobs.grad.tolist() == pytest.approx([0.0, 2.0])
    sums = {name: float(value) for name, value in result.sums.items()}
    assert sums == pytest.approx(
        {
            "actor/pg_loss": 1.4,
            "actor/pg_clipfrac": 1.0,
            "actor/ppo_kl": log(0.2) - log(0.3),
            "actor/entropy": 1.0,
            "correction/weight_mean": 2.5,
            "correction/truncated_share": 1.0,
            "mismatch/k1": log(0.4) - log(0.2) + log(0.2) - log(0.6),
            "mismatch/k3": (0.5 - 1 - log(0.5)) + (3 - 1 - log(3)),
        }
    )
    maxima = {name: float(value) for name, value in result.maxima.items()}
    assert maxima == pytest.approx({"correction/weight_max": 2.0, "mismatch/logprob_diff_max": log(3)})


def test_on_policy_the_loss_is_minus_the_advantages_and_the_gradient_is_not_zero():
    # The trap: centred advantages sum to a loss of 0 at ratio 1, whatever happens; the gradient tells.
    batch = token_batch([-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0], [0.5, -0.5])
    result = build_recipe(GrpoConfig()).loss(batch)
    result.loss.backward()
    assert float(result.loss.detach()) == 0.0
    assert batch.learner_logprobs.grad is not None
    assert batch.learner_logprobs.grad.tolist() == [-0.5, 0.5]


def test_sums_do_not_depend_on_how_tokens_are_split():
    # Rows of 1 token with loss 1 and 3 tokens with loss 3: the token mean is 2.5; a mean of means would be 2.
    recipe = build_recipe(GrpoConfig())

    def sum_of(losses):
        zeros = [0.0] * len(losses)
        return float(recipe.loss(token_batch(zeros, zeros, zeros, [-loss for loss in losses])).loss.detach())

    assert sum_of([1.0, 3.0, 3.0, 3.0]) / 4 == 2.5
    assert (sum_of([1.0]) + sum_of([3.0, 3.0, 3.0]) + sum_of([])) / 4 == 2.5


def test_group_advantages_keep_their_precision_far_from_zero():
    # Mutation caught: float32 statistics (1e8 + 1 is 1e8 there).
    found = group_advantages(
        torch.tensor([1e8, 1e8 + 1], dtype=torch.float64),
        torch.tensor([0, 0]),
        divide_by_std=False,
        std_epsilon=0.0,
    )
    assert found.tolist() == [-0.5, 0.5]
