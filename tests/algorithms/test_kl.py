"""KL estimators and controllers by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.losses.kl import kl_estimate
from asyncrl.algorithms.losses.kl_controller import AdaptiveKlController, FixedKlController

LOG2 = math.log(2.0)


def estimate(difference, **options):
    """(values, gradients) at reference log-probs of -1."""
    learner = (torch.tensor(difference, dtype=torch.float64) - 1.0).requires_grad_()
    values = kl_estimate(learner, torch.full_like(learner, -1.0), **options)
    values.sum().backward()
    assert learner.grad is not None
    return values.tolist(), learner.grad.tolist()


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        ("k1", [LOG2, -LOG2], [1.0, 1.0]),
        ("k2", [LOG2**2 / 2] * 2, [LOG2, -LOG2]),
        ("k3", [0.5 - 1 + LOG2, 2 - 1 - LOG2], [0.5, -1.0]),
        ("abs", [LOG2, LOG2], [1.0, -1.0]),
    ],
)
def test_estimators_by_hand(estimator, values, gradients):
    # Mutations caught: the ratio upside down (k3 of KL(reference || learner)), k2 without the half.
    assert estimate([LOG2, -LOG2], estimator=estimator) == (pytest.approx(values), pytest.approx(gradients))


def test_straight_through_keeps_the_value_and_takes_the_gradient_of_k2():
    # Mutation caught: the value of k2, or the gradient of k3.
    values, gradients = estimate([LOG2], estimator="k3", gradient_of_k2=True)
    assert values == pytest.approx([0.5 - 1 + LOG2])
    assert gradients == pytest.approx([LOG2])


def test_clamps_cut_value_and_gradient_where_they_bind():
    # Mutation caught: a clamp of the input after exp (inf), or a clamped value that still has a gradient.
    values, gradients = estimate([-30.0, 0.0], estimator="k3", clamp_log_ratio=20.0, clamp_estimate=10.0)
    assert values == [10.0, 0.0]
    assert gradients == [0.0, 0.0]


def test_the_weight_adds_its_own_gradient():
    # Mutation caught: a detached weight: the score-function term d * grad log p is what makes k1 a loss at all.
    learner = torch.tensor([LOG2], requires_grad=True)
    weight = (learner - learner.detach()).exp()
    kl_estimate(learner, torch.zeros(1), estimator="k1", weight=weight).sum().backward()
    assert learner.grad is not None
    assert learner.grad.tolist() == pytest.approx([LOG2 + 1.0])


@settings(deadline=None, max_examples=60)
@given(
    differences=st.lists(st.floats(-8, 8), min_size=1, max_size=8),
    broken=st.sampled_from([math.inf, -math.inf, math.nan]),
    estimator=st.sampled_from(["k1", "k2", "k3", "abs"]),
)
def test_a_token_that_is_not_finite_touches_no_other(differences, broken, estimator):
    # Mutation caught: any reduction inside the estimator.
    alone, gradients = estimate(differences, estimator=estimator)
    values, others = estimate([*differences, broken], estimator=estimator)
    assert (values[:-1], others[:-1]) == (alone, gradients)
    assert min(alone) >= (-8 if estimator == "k1" else -1e-12)


def test_controllers_by_hand():
    # Mutations caught: the error not cut at 0.2, the coefficient added to rather than multiplied.
    adaptive = AdaptiveKlController(0.1, target=6.0, horizon=1000.0)
    adaptive.update(6.6, 100)  # error 0.1
    assert adaptive.coefficient == pytest.approx(0.1 * 1.01)
    adaptive.update(600.0, 100)  # error cut to 0.2
    assert adaptive.coefficient == pytest.approx(0.1 * 1.01 * 1.02)
    adaptive.update(0.0, 500)
    assert adaptive.coefficient == pytest.approx(0.1 * 1.01 * 1.02 * 0.9)
    fixed = FixedKlController(0.1)
    fixed.update(600.0, 100)
    assert fixed.coefficient == 0.1
