"""Aggregation by hand: what each mode divides by, and that splitting a mini-batch changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.losses import Counts, aggregate
from asyncrl.algorithms.segments import Segments

LOSSES = [1.0, 3.0, 3.0, 3.0, 8.0]
COUNTS = [1, 3, 0, 1]
GROUPS = torch.tensor([0, 0, 1, 1])
MODES = {
    "token-mean": 18 / 5,
    "token-sum": 18.0,
    "seq-mean-token-sum": 18 / 4,
    "seq-mean-token-mean": (1 + 3 + 0 + 8) / 4,
    "seq-mean-token-sum-norm": 18 / 10 / 4,
    "prompt-mean": (10 / 4 + 8) / 2,
}


def aggregated(mode, **options):
    return float(
        aggregate(
            torch.tensor(LOSSES),
            Segments.of_counts(COUNTS),
            mode=mode,
            length=10,
            group_index=GROUPS,
            **options,
        )
    )


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_by_hand(mode):
    # Mutations caught: a row mean for a token mean, a group mean of row means, the empty trajectory not counted.
    assert aggregated(mode) == pytest.approx(MODES[mode])


def test_the_denominator_can_be_named():
    # Mutation caught: the denominator of the mode whatever was asked for.
    assert aggregated("seq-mean-token-mean", divide_by="trained_trajectories") == pytest.approx(12 / 3)
    assert aggregated("token-sum", divide_by=64.0) == pytest.approx(18 / 64)
    assert aggregated("token-mean", counts=Counts(36, 0, 0, 0)) == pytest.approx(0.5)


def test_a_mini_batch_without_a_token_gives_zero_or_nan_as_asked():
    # Mutation caught: 0 / 0 by default, which would end a run whose correction rejected everything.
    nothing = Segments.of_counts([0, 0])
    assert float(aggregate(torch.empty(0), nothing, mode="token-mean")) == 0.0
    assert math.isnan(float(aggregate(torch.empty(0), nothing, mode="token-mean", at_least=0.0)))


def test_what_is_not_finite_stays_in_its_place():
    # Mutation caught: nan_to_num; a NaN token must reach the loss, so that the gradient norm refuses the step.
    values = torch.tensor([math.nan, 1.0])
    assert math.isnan(float(aggregate(values, Segments.of_counts([1, 1]), mode="seq-mean-token-mean")))


@settings(deadline=None, max_examples=60)
@given(
    groups=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=5),
    mode=st.sampled_from(sorted(MODES)),
    data=st.data(),
)
def test_microbatches_and_ranks_in_any_order_give_the_loss_of_the_mini_batch(groups, mode, data):
    # Mutation caught: a denominator of the microbatch, which makes means of means.
    values = [
        torch.tensor(data.draw(st.lists(st.floats(-5, 5), min_size=sum(g), max_size=sum(g)))) for g in groups
    ]
    parts = [
        (v.double(), Segments.of_counts(g), torch.full((len(g),), 7 * i))
        for i, (v, g) in enumerate(zip(values, groups, strict=True))
    ]
    counts = [Counts.of(segments, index) for _, segments, index in parts]
    total = sum(counts[1:], counts[0])
    whole = aggregate(
        torch.cat([v for v, _, _ in parts]),
        Segments.of_counts([count for group in groups for count in group]),
        mode=mode,
        length=10,
        group_index=torch.cat([index for _, _, index in parts]),
    )
    order = data.draw(st.permutations(parts))
    split = sum(
        float(aggregate(v, segments, mode=mode, length=10, group_index=index, counts=total))
        for v, segments, index in order
    )
    assert split == pytest.approx(float(whole), abs=1e-9)
