"""Balancing: what a partition must be for any costs, and how good it is."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.coordinator.balance import (
    balance,
    group_cost,
    largest_differencing,
    longest_first,
    pack,
    part_costs,
)

COSTS = st.lists(st.integers(0, 1000), max_size=40)


def items_of(parts):
    return sorted(item for part in parts for item in part)


# Mutations caught: a part that is full taking one more (`>=` made `>` in longest_first); left-over items put into a
# partition of their own each (largest_differencing); an exchange that forgets what it takes (refined).
@pytest.mark.parametrize("method", [balance, longest_first, largest_differencing])
@given(costs=COSTS, num_parts=st.integers(1, 9), equal_count=st.booleans())
@settings(deadline=None)
def test_every_item_is_in_one_part_and_equal_counts_differ_by_one(method, costs, num_parts, equal_count):
    parts = method(costs, num_parts, equal_count=equal_count)
    assert len(parts) == num_parts
    assert items_of(parts) == list(range(len(costs)))
    if equal_count:
        counts = [len(part) for part in parts]
        assert max(counts) - min(counts) <= 1


# Longest first stays within 4/3 - 1/(3 k) of the best (Graham 1969), and neither the choice nor an exchange makes the
# heaviest part heavier. Mutation caught: an exchange that forgets what it takes.
@given(costs=st.lists(st.integers(1, 30), min_size=1, max_size=8), num_parts=st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_the_heaviest_part_is_near_the_best_there_is(costs, num_parts):
    best = min(
        max(sum(c for c, p in zip(costs, places, strict=True) if p == part) for part in range(num_parts))
        for places in product(range(num_parts), repeat=len(costs))
    )
    assert (
        best
        <= max(part_costs(balance(costs, num_parts), costs))
        <= (4 / 3 - 1 / (3 * num_parts)) * best + 1e-9
    )


def test_exchanges_find_what_greedy_methods_miss():
    # Mutation caught: no refinement.
    assert sorted(part_costs(balance([3, 3, 2, 2, 2], 2), [3, 3, 2, 2, 2])) == [6, 6]
    costs = [8, 7, 6, 5, 4]  # differencing alone gives 16 and 14
    assert sorted(part_costs(balance(costs, 2), costs)) == [15, 15]


@given(costs=COSTS.filter(bool), capacity=st.integers(1, 1500), min_parts=st.integers(0, 5))
@settings(deadline=None)
def test_packing_keeps_to_the_capacity_but_for_single_giants(costs, capacity, min_parts):
    parts = pack(costs, capacity, min_parts=min_parts)
    assert items_of(parts) == list(range(len(costs)))
    assert len(parts) >= min_parts
    for part, cost in zip(parts, part_costs(parts, costs), strict=True):
        assert cost <= capacity or len(part) == 1


def test_packing_of_nothing():
    assert pack([], 8, min_parts=0) == []
    assert pack([], 8, min_parts=2) == [[], []]
    assert balance([], 3) == [[], [], []]


def test_a_group_costs_its_tokens_and_what_attends_to_what():
    # Prompt of 3, completions of 2 and 1: 6 tokens; 9 + 2 * (6 + 2) + 1 * (6 + 1) = 32.
    # Mutation caught: C^2 alone, without the prompt that a completion attends to (14).
    assert group_cost(3, [2, 1], linear=10.0) == 60 + 32
    # Completions that are seen together as one sequence cost (3 + 3)^2 = 36: more than two that cannot see each other.
    assert group_cost(3, [3], linear=0.0) == 36


def test_no_parts_is_refused():
    with pytest.raises(ValueError, match="num_parts is 0"):
        balance([1.0], 0)
