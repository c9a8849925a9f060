"""The data order and the seeds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.coordinator.order import epoch_order, place, request_seed


@given(seed=st.integers(0, 2**62), num_rows=st.integers(1, 200))
@settings(max_examples=30, deadline=None)
def test_every_epoch_holds_every_row_once(seed: int, num_rows: int):
    # Mutation: a permutation drawn with replacement, or ordinal // n swapped with ordinal % n.
    for epoch in (0, 1, 2):
        rows = [place(seed, epoch * num_rows + position, num_rows) for position in range(num_rows)]
        assert [r[0] for r in rows] == [epoch] * num_rows
        assert sorted(r[1] for r in rows) == list(range(num_rows))


def test_epochs_and_seeds_shuffle_differently_and_the_same_ones_alike():
    # Mutation: leaving epoch out of the hash replays epoch 0 for ever.
    assert list(epoch_order(0, 0, 50)) != list(epoch_order(0, 1, 50))
    assert list(epoch_order(0, 0, 50)) != list(epoch_order(1, 0, 50))
    first = list(epoch_order(7, 3, 50))
    epoch_order.cache_clear()
    assert list(epoch_order(7, 3, 50)) == first


def test_request_seeds_are_63_bits_and_do_not_collide_between_neighbours():
    # Mutation: seed + sample collides (seed 1, sample 1) with (seed 2, sample 0).
    seeds = {
        request_seed(seed, ordinal, sample, redraw)
        for seed in range(6)
        for ordinal in range(20)
        for sample in range(8)
        for redraw in range(2)
    }
    assert len(seeds) == 6 * 20 * 8 * 2
    assert all(0 <= s < 2**63 for s in seeds)


def test_a_request_seed_is_the_same_on_every_machine():
    # Mutation: Python's salted hash() instead of blake2b.
    assert request_seed(0, 0, 0, 0) == 2235979303852607087
