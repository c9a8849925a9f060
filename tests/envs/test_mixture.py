"""Shares of sources: the cycle of turns, against the exact proportions."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.envs.mixture import integer_weights, shares, take_turns
from asyncrl.errors import ConfigError


@given(weights=st.lists(st.integers(1, 40), min_size=1, max_size=7))
@settings(max_examples=60, deadline=None)
def test_every_source_is_within_one_of_its_share_at_every_prefix(weights: list[int]):
    # Mutation: take the source with the largest deficit instead of the earliest deadline; leave out the release
    # times (then a source is ahead by more than one).
    total = sum(weights)
    counts = [0] * len(weights)
    turns = take_turns(weights)
    for length, source in enumerate(turns, start=1):
        counts[source] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - Fraction(length * weight, total)) < 1
    assert counts == weights


def test_two_to_one_is_taken_in_turns_not_in_blocks():
    # Mutation: one source's turns after the other's -> [0, 0, 1].
    assert take_turns([2, 1]) == [0, 1, 0]


@pytest.mark.parametrize(
    ("weights", "integers"),
    [
        ([1.0, 1.0], [1, 1]),
        ([0.7, 0.3], [7, 3]),
        ([0.1, 0.2, 0.7], [1, 2, 7]),
        ([2.5, 1], [5, 2]),
        ([4, 2], [2, 1]),
    ],
)
def test_weights_are_the_decimals_they_are_written_as(weights: list[float], integers: list[int]):
    # Mutation: Fraction(0.1) -> 3602879701896397 / 36028797018963968.
    assert integer_weights(weights) == integers


def test_weights_whose_cycle_is_too_long_are_refused_with_rounder_ones():
    with pytest.raises(ConfigError, match=r"weight: 0\.3333333, 0\.6666667 .* use rounder .*0\.333, 0\.667"):
        integer_weights([0.3333333, 0.6666667])


def test_the_rounder_weights_are_weights_that_are_taken():
    # Mutation: round a small share to 0.000, which the configuration refuses.
    with pytest.raises(ConfigError, match=r"use rounder numbers, such as 0\.001, 1\.000$"):
        integer_weights([1e-7, 1.0])
    assert integer_weights([0.001, 1.0]) == [1, 1000]


def test_equal_weights_leave_the_shares_to_the_sizes_and_others_do_not():
    # Mutation: shares by weight always -> 0.5, 0.5.
    assert shares([30, 10], [2.0, 2.0]) == [0.75, 0.25]
    assert shares([30, 10], [1.0, 4.0]) == [0.2, 0.8]
