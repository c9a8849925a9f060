"""The data order and the seeds."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.envs.order import DataOrder, epoch_order, request_seed


@given(seed=st.integers(0, 2**62), sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_with_equal_weights_every_epoch_holds_every_prompt_once(seed: int, sizes: list[int]):
    # Mutation: a permutation drawn with replacement, or ordinal // n swapped with ordinal % n.
    order, num_prompts = DataOrder(seed, sizes, [3.0] * len(sizes)), sum(sizes)
    for epoch in (0, 1, 2):
        places = [order.place(epoch * num_prompts + position) for position in range(num_prompts)]
        assert [p[0] for p in places] == [epoch] * num_prompts
        assert sorted(p[1] for p in places) == list(range(num_prompts))
        assert {order.epoch(epoch * num_prompts + p) for p in range(num_prompts)} == {epoch}


def test_a_batch_goes_on_into_the_next_epoch_so_that_no_row_is_left_out():
    # 10 rows in batches of 4: the third batch has the last two rows of one epoch and the first two of the next.
    # 3 rows in a batch of 4: one row twice. Mutations: drop an epoch's rest (its rows would never be seen), or begin
    # every batch in an epoch of its own.
    batches = [[DataOrder(5, [10], [1.0]).place(4 * b + i) for i in range(4)] for b in range(5)]
    assert [epoch for epoch, _ in batches[2]] == [0, 0, 1, 1]
    assert Counter(row for batch in batches for _, row in batch) == dict.fromkeys(range(10), 2)
    few = [DataOrder(5, [3], [1.0]).place(i) for i in range(4)]
    assert sorted(row for _, row in few[:3]) == [0, 1, 2]
    assert few[3] == (1, few[3][1])


def test_equal_weights_are_the_shuffled_concatenation_that_one_source_has():
    # The literal is the order that a run with one source has always had. Mutation: a seed of its own for a single
    # stream (_hash63(seed, 0)) -> resumed runs would see other prompts.
    one, two = DataOrder(0, [10], [1.0]), DataOrder(0, [4, 6], [0.5, 0.5])
    indices = [one.place(ordinal)[1] for ordinal in range(10)]
    assert indices == epoch_order(0, 0, 10).tolist() == [6, 3, 1, 9, 5, 8, 0, 7, 2, 4]
    assert [two.place(ordinal) for ordinal in range(25)] == [one.place(ordinal) for ordinal in range(25)]


SOURCES = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=2, max_size=4)


@given(seed=st.integers(0, 2**62), sources=SOURCES)
@settings(max_examples=30, deadline=None)
def test_with_weights_each_source_has_its_share_and_is_gone_through_evenly(
    seed: int, sources: list[tuple[int, int]]
):
    # Mutation: index a source's epoch by the cycle's position instead of by what was drawn from it -> prompts
    # are drawn again before all of their source were.
    sizes, weights = [s[0] for s in sources], [float(s[1]) for s in sources]
    weights[0] += 10.0  # they differ
    order, starts = DataOrder(seed, sizes, weights), [0, *accumulate(sizes)]
    drawn: list[list[int]] = [[] for _ in sizes]
    for ordinal in range(400):
        epoch, index = order.place(ordinal)
        source = int(np.searchsorted(starts, index, side="right")) - 1
        assert epoch == len(drawn[source]) // sizes[source]
        drawn[source].append(index)
        for k, weight in enumerate(weights):
            assert abs(len(drawn[k]) - (ordinal + 1) * weight / sum(weights)) < 1 + 1e-9
        assert order.epoch(ordinal) == max(
            (len(d) - 1) // size for d, size in zip(drawn, sizes, strict=True) if d
        )
    for k, size in enumerate(sizes):
        counts = Counter(drawn[k])
        rounds = len(drawn[k]) // size
        assert all(counts[index] in (rounds, rounds + 1) for index in range(starts[k], starts[k + 1]))


def test_the_streams_of_a_mixture_are_shuffled_differently_in_every_epoch_and_source():
    # Mutation: one seed for all streams -> both sources are shuffled alike.
    order = DataOrder(7, [40, 40], [1.0, 2.0])
    places = [order.place(ordinal) for ordinal in range(240)]
    by_source = [[i for _, i in places if i < 40], [i - 40 for _, i in places if i >= 40]]
    epochs = [by_source[0][:40], by_source[0][40:80], by_source[1][:40], by_source[1][40:80]]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [DataOrder(7, [40, 40], [1.0, 2.0]).place(ordinal) for ordinal in (239, 3)] == [
        places[239],
        places[3],
    ]


def test_epochs_and_seeds_shuffle_differently_and_the_same_ones_alike():
    # Mutation: leaving epoch out of the hash replays epoch 0 for ever.
    assert list(epoch_order(0, 0, 50)) != list(epoch_order(0, 1, 50))
    assert list(epoch_order(0, 0, 50)) != list(epoch_order(1, 0, 50))
    assert list(epoch_order(7, 3, 50)) == list(epoch_order(7, 3, 50))


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
