"""Whitening by hand, and over any split. (Comments name the mutations that tests catch.)"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.advantages import Moments, whiten


def whitened(values, **options):
    values = torch.tensor(values, dtype=torch.float64)
    return whiten(values, Moments.of(values), **options).tolist()


def test_whitening_by_hand():
    # Mean 2, squares 4 + 0 + 4. Mutations: n for n - 1; epsilon outside the root.
    assert whitened([0.0, 2.0, 4.0], epsilon=0.0) == [-1.0, 0.0, 1.0]
    assert whitened([0.0, 2.0, 4.0], epsilon=5.0)[2] == pytest.approx(2 / 3)
    assert whitened([0.0, 2.0, 4.0], epsilon=2.0, epsilon_in="std")[2] == pytest.approx(0.5)
    assert whitened([0.0, 2.0, 4.0], epsilon=16.0, epsilon_in="variance_floor")[2] == pytest.approx(0.5)
    assert whitened([0.0, 2.0, 4.0], epsilon=0.0, deviation="population")[2] == pytest.approx(math.sqrt(1.5))


def test_the_mean_may_stay_and_the_scale_may_stay():
    assert whitened([0.0, 2.0, 4.0], epsilon=0.0, shift_mean=False) == [1.0, 2.0, 3.0]
    assert whitened([0.0, 2.0, 4.0], deviation="none") == [-2.0, 0.0, 2.0]


@pytest.mark.parametrize("value", [0.1, 0.7, 1e8, -3.3, 0.0])
@pytest.mark.parametrize("count", [1, 7, 1000])
def test_equal_values_are_exactly_zero(value, count):
    # Mutation: no threshold for rounding; the sums of 0.1 leave a mean that is off by 1e-17, times 1e4.
    assert whitened([value] * count) == [0.0] * count
    assert whitened([value] * count, deviation="none") == [0.0] * count


def test_a_small_spread_is_not_taken_for_rounding():
    assert whitened([1.0, 1.0 + 1e-6], epsilon=0.0) == pytest.approx(
        [-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-3
    )


def test_nothing_and_one_value():
    assert whitened([]) == []
    assert float(Moments.of(torch.zeros(0)).mean) == 0.0
    assert float(Moments.of(torch.zeros(0)).variance()) == 0.0
    assert whitened([5.0]) == [0.0]


def test_a_nan_is_not_hidden():
    assert all(math.isnan(value) for value in whitened([1.0, math.nan]))


def test_the_dtype_stays():
    values = torch.tensor([1.0, 2.0])
    assert whiten(values, Moments.of(values)).dtype == torch.float32


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.floats(-10, 10, width=32), max_size=20), cuts=st.lists(st.integers(0, 20), max_size=3)
)
def test_moments_of_parts_add_up(values, cuts):
    # Mutation: a mean of means, or moments in float32.
    tensor = torch.tensor(values)
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [tensor[a:b] for a, b in pairwise(edges)]
    together = Moments(torch.stack([Moments.of(part).sums for part in parts]).sum(0))
    whole = Moments.of(tensor)
    assert together.sums.tolist() == pytest.approx(whole.sums.tolist(), rel=1e-12, abs=1e-12)
    found = torch.cat([whiten(part, together) for part in parts])
    torch.testing.assert_close(found, whiten(tensor, whole))
