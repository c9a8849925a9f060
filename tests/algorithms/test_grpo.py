"""GRPO by hand: advantages, clipping, importance weights, the loss of a mini-batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.advantages.estimators import trajectory_advantages
from asyncrl.algorithms.correction import Policies, correct, report
from asyncrl.algorithms.losses import Counts, bounded_exp, clipped_surrogate, importance_ratio
from asyncrl.algorithms.losses.objective import LossCounts, Objective, objective
from asyncrl.algorithms.losses.policy import LossTokens
from asyncrl.algorithms.segments import Segments
from asyncrl.config import AlgorithmConfig
from asyncrl.config.advantages import OutcomeAdvantages
from asyncrl.config.corrections import OffPolicyCorrection

UNSCORED = math.nan


def advantages(rewards, group_index=None, scale="std"):
    index = torch.tensor(group_index or [0] * len(rewards), dtype=torch.int64)
    config = OutcomeAdvantages(scale=scale)
    return trajectory_advantages(config, torch.tensor(rewards, dtype=torch.float64), index).tolist()


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
    ratio = importance_ratio(learner, torch.zeros_like(learner), Segments.of_counts([len(ratios)]))
    found = clipped_surrogate(ratio, torch.tensor(advantage), clip_low=low, clip_high=high)
    found.loss.sum().backward()
    assert learner.grad is not None
    return found.loss.tolist(), found.diagnostics["pg_clipfrac"].tolist(), learner.grad.tolist()


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
    policies = Policies(proximal, proximal, torch.zeros(3))
    segments = Segments.of_counts([3])
    found = correct(policies, segments, OffPolicyCorrection())
    assert found.weights.tolist() == pytest.approx([0.5, 1.0, 2.0])
    assert not found.weights.requires_grad
    assert report(found.diagnostics)["weight/moved/mean"] == pytest.approx(1 / 3)
    unweighted = correct(policies, segments, OffPolicyCorrection(weight=None))
    assert unweighted.weights.tolist() == [1.0, 1.0, 1.0]
    assert report(unweighted.diagnostics)["weight/moved/mean"] == 0.0


def loss_of(
    learner, proximal, rollout, advantage, counts=None
) -> tuple[Objective, LossTokens, dict[str, float]]:
    """GRPO's defaults on tokens of one trajectory: (objective, its tokens, what the correction reports)."""
    rows = [torch.tensor(values, dtype=torch.float64) for values in (learner, proximal, rollout, advantage)]
    rows[0].requires_grad_()
    config, segments = AlgorithmConfig(), Segments.of_counts([len(learner)])
    found = correct(Policies(*rows[:3]), segments, config.correction)
    tokens = LossTokens(
        rows[0],
        rows[1],
        rows[3],
        segments,
        rollout_logprobs=rows[2],
        entropy=torch.full_like(rows[1], 0.5),
        token_weights=found.weights,
    )
    counts = LossCounts(counts or Counts.of(segments))
    return objective(config.loss, tokens, counts), tokens, report(found.diagnostics)


def test_loss_and_metrics_by_hand():
    # Ratios 1.5 and 1 against the proximal policy, weights 0.5 and 2 (3 truncated); advantages 1 and -1.
    # Mutations caught: weights or mismatch from the learner instead of the proximal policy; a sum for a mean.
    log = math.log
    found, tokens, said = loss_of(
        [log(0.3), log(0.6)], [log(0.2), log(0.6)], [log(0.4), log(0.2)], [1.0, -1.0]
    )
    assert float(found.loss.detach()) == pytest.approx((-1.2 * 0.5 + 1.0 * 2.0) / 2)
    found.loss.backward()
    assert tokens.learner_logprobs.grad is not None
    assert tokens.learner_logprobs.grad.tolist() == pytest.approx([0.0, 1.0])
    assert float(found.parts["policy"]) == pytest.approx(0.7)
    assert found.diagnostics["pg_clipfrac"].tolist() == [True, False]
    assert found.diagnostics["ppo_kl"].tolist() == pytest.approx([log(0.2) - log(0.3), 0.0])
    assert said["weight/applied/mean"] == pytest.approx(1.25)
    assert said["weight/applied/max"] == pytest.approx(2.0)
    assert said["weight/moved/mean"] == pytest.approx(0.5)
    assert said["mismatch/k1/mean"] == pytest.approx((log(0.4) - log(0.2) + log(0.2) - log(0.6)) / 2)
    assert said["mismatch/k3/mean"] == pytest.approx(((0.5 - 1 - log(0.5)) + (3 - 1 - log(3))) / 2)
    assert said["mismatch/logprob_difference/max"] == pytest.approx(log(3))


def test_on_policy_the_loss_is_minus_the_advantages_and_the_gradient_is_not_zero():
    # The trap: centred advantages sum to a loss of 0 at ratio 1, whatever happens; the gradient tells.
    found, tokens, _ = loss_of([-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0], [0.5, -0.5])
    found.loss.backward()
    assert float(found.loss.detach()) == 0.0
    assert tokens.learner_logprobs.grad is not None
    assert tokens.learner_logprobs.grad.tolist() == [-0.25, 0.25]


def test_the_loss_does_not_depend_on_how_tokens_are_split():
    # Rows of 1 token with loss 1 and 3 tokens with loss 3: the token mean is 2.5; a mean of means would be 2.
    counts = Counts(tokens=4, trajectories=2, trained_trajectories=2, groups=1)

    def share(losses):
        zeros = [0.0] * len(losses)
        return float(loss_of(zeros, zeros, zeros, [-loss for loss in losses], counts)[0].loss.detach())

    assert share([1.0, 3.0, 3.0, 3.0]) == 2.5
    assert share([1.0]) + share([3.0, 3.0, 3.0]) + share([]) == 2.5


def test_group_advantages_keep_their_precision_far_from_zero():
    # Mutation caught: float32 statistics (1e8 + 1 is 1e8 there).
    assert advantages([1e8, 1e8 + 1], scale="none") == [-0.5, 0.5]
