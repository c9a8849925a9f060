"""Options that change what an update costs, and nothing of what it computes."""

from __future__ import annotations

import shutil

import pytest
import torch
from learner_cases import (
    assert_gradients_close,
    one_rank,
    record_gradients,
    sgd_config,
    shard_of,
    uneven_groups,
    write_model,
)
from transformers import AttentionInterface

from asyncrl.learner.attention import ATTENTION_NAME, group_attention

EVERY_GROUP = [[[0, 1, 2, 3, 4]]]


def gradients_with(path, store, **options):
    with one_rank(path, sgd_config(**options), store) as learner:
        gradients = record_gradients(learner)
        learner.update(shard_of(uneven_groups(), EVERY_GROUP))
    return gradients


def test_checkpointed_activations_give_the_same_bits_and_keep_the_names(tmp_path, monkeypatch):
    # Mutations caught: a wrapper that renames parameters (nothing would be published); an option that does nothing
    # (the attention of each of the two blocks runs once).
    calls = []

    def counted(*arguments, **options):
        calls.append(1)
        return group_attention(*arguments, **options)

    path = write_model(tmp_path / "model", "llama", tied=True)
    expected = gradients_with(path, tmp_path / "plain")
    monkeypatch.setitem(AttentionInterface._global_mapping, ATTENTION_NAME, counted)
    found = gradients_with(path, tmp_path / "checkpointed", activation_checkpointing=True)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(calls) == 2 * 2 + 2 * 2  # the check of the head runs both blocks twice, and so does the update


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_blocks_give_the_same_gradients(tmp_path):
    # Mutation caught: compile with static shapes (every microbatch would compile anew and at last fall back).
    path = write_model(tmp_path / "model", "llama", tied=True)
    expected = gradients_with(path, tmp_path / "plain")
    assert_gradients_close(gradients_with(path, tmp_path / "compiled", compile=True), expected)
