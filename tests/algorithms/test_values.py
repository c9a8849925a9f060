"""The value loss and explained variance by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.losses import Counts
from asyncrl.algorithms.losses.values import (
    ValueSums,
    critic_objective,
    explained_variance,
    value_loss,
    value_sums,
)
from asyncrl.algorithms.segments import Segments
from asyncrl.config.losses import ValueLossConfig


def test_the_clip_takes_the_larger_error_and_cuts_the_gradient_when_it_decides():
    # Mutations caught: minimum for maximum, the value clipped around the return, the factor 1/2 left out.
    values = torch.tensor([1.0, 1.0, 0.3], requires_grad=True)
    returns = torch.tensor([2.0, 0.0, 1.0])
    loss, diagnostics = value_loss(values, torch.zeros(3), returns, clip=0.5)
    assert loss.tolist() == pytest.approx([1.5**2 / 2, 1.0 / 2, 0.7**2 / 2])
    assert diagnostics["vf_clipfrac"].tolist() == [True, False, False]
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, 1.0, -0.7])


def test_without_a_clip_and_with_huber():
    # Mutation caught: a delta of 1.
    values, zeros = torch.tensor([1.0, 30.0]), torch.zeros(2)
    assert value_loss(values, zeros, zeros).loss.tolist() == [0.5, 450.0]
    assert value_loss(values, zeros, zeros, error="huber").loss.tolist() == [0.5, 10.0 * (30.0 - 5.0)]


def test_the_critic_objective_is_a_share_of_the_mini_batch():
    # Mutations caught: the clip not handed on; the microbatch's own count.
    config = ValueLossConfig.model_validate({"preset": "verl", "clip": 0.2})
    segments = Segments.of_counts([2])
    share, diagnostics = critic_objective(
        config, torch.ones(2), torch.zeros(2), torch.ones(2), segments, counts=Counts(4, 2, 2, 2)
    )
    assert float(share) == pytest.approx(2 * 0.8**2 / 2 / 4)
    assert diagnostics["vf_clipfrac"].all()
    assert ValueLossConfig.model_validate({"preset": "verl"}).clip == 0.5


def test_explained_variance_by_hand():
    # Mutations caught: the mean of the residuals not removed, 1 - the ratio of sums of squares.
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])
    perfect_but_shifted = value_sums(returns + 5.0, returns)
    assert float(explained_variance(perfect_but_shifted)) == pytest.approx(1.0)
    assert float(explained_variance(value_sums(torch.ones(4), returns))) == pytest.approx(0.0)
    assert float(explained_variance(value_sums(-returns, returns))) == pytest.approx(-3.0)
    assert math.isnan(float(explained_variance(value_sums(returns[:1], returns[:1]))))


@settings(deadline=None, max_examples=60)
@given(
    pairs=st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=3, max_size=12),
    cut=st.integers(0, 12),
)
def test_sums_of_parts_add_up(pairs, cut):
    # Mutation caught: means in the sums.
    values, returns = torch.tensor(pairs, dtype=torch.float64).T
    parts = [value_sums(values[s], returns[s]) for s in (slice(0, cut), slice(cut, None))]
    added = ValueSums(*[sum(fields) for fields in zip(*parts, strict=True)])
    assert torch.stack(list(added)).tolist() == pytest.approx(
        torch.stack(list(value_sums(values, returns))).tolist()
    )
    if float(returns.var()) > 1e-3:
        expected = 1 - (returns - values).var() / returns.var()
        assert float(explained_variance(added)) == pytest.approx(float(expected), abs=1e-6)
