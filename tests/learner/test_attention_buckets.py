"""Completions of about equal length attend together; the others would only pad."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learner.attention import GroupLayout, bucket_by_length

LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=24)


@given(lengths=LENGTHS, share=st.floats(1.0, 3.0))
def test_every_completion_is_in_one_bucket_and_padding_is_bounded(lengths: list[int], share: float):
    # Mutations caught: the bound against the bucket's slots so far; a completion in two buckets.
    buckets = bucket_by_length(lengths, share)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        of_bucket = [lengths[i] for i in bucket]
        assert len(bucket) * max(of_bucket) <= share * sum(of_bucket) + 1e-9


def test_equal_lengths_share_one_call_and_a_long_tail_does_not():
    # Mutation caught: a bucket a completion (64 times the calls), or one for all (what this replaces).
    assert bucket_by_length([7] * 8, 1.0) == [list(range(8))]
    assert bucket_by_length([20, 21, 300, 19, 22, 20], 1.1) == [[2], [0, 1, 3, 4, 5]]


@given(lengths=LENGTHS)
def test_the_slot_of_each_packed_token_holds_that_token(lengths: list[int]):
    # Mutation caught: buckets put end to end in the order of lengths instead of that of the packed row.
    span = GroupLayout([(3, lengths)], torch.device("cpu")).spans[0]
    total = sum(lengths)
    if span.packed_index is None:
        assert len(set(lengths)) == 1
        return
    slots = torch.cat([bucket.padded_index for bucket in span.buckets if bucket.padded_index is not None])
    assert slots[span.packed_index].tolist() == list(range(total))
    assert sum(bucket.num_completions for bucket in span.buckets) == len(lengths)


@pytest.mark.parametrize("lengths", [[], [5], [4, 4]])
def test_no_completion_and_equal_ones_need_no_index(lengths: list[int]):
    span = GroupLayout([(3, lengths)], torch.device("cpu")).spans[0]
    assert span.packed_index is None
    assert len(span.buckets) == (1 if lengths else 0)
