"""Completions of about equal length attend together; the others would only pad."""

from __future__ import annotations

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


@given(
    groups=st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 40), max_size=8)), min_size=1, max_size=3
    )
)
def test_the_slot_of_each_packed_token_holds_that_token_and_the_others_are_padding(groups):
    # Mutation caught: buckets put end to end in the order of lengths instead of that of the packed row.
    layout = GroupLayout(groups, torch.device("cpu")).padded
    total = sum(prompt + sum(lengths) for prompt, lengths in groups)
    assert layout.token_of_slot[layout.slot_of_token].tolist() == list(range(total))
    assert sorted([*layout.slot_of_token.tolist(), *layout.padding.tolist()]) == list(
        range(len(layout.token_of_slot))
    )
    assert sum(layout.piece_slots) == len(layout.token_of_slot)
    assert len(layout.piece_slots) == len(groups) + sum(map(len, layout.buckets))


def test_a_mask_hides_the_keys_after_each_query_and_is_made_once():
    # Mutations caught: triu(prompt_length) (a token would not see itself); a mask a layer.
    bucket = GroupLayout([(2, [3, 3])], torch.device("cpu")).padded.buckets[0][0]
    mask = bucket.mask(2, like=torch.zeros(1))
    assert (mask == 0).int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]] * 2
    assert bucket.mask(2, like=torch.zeros(1)) is mask
