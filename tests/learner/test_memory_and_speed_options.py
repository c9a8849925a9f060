"""Options that change what an update costs, and nothing of what it computes."""

from __future__ import annotations

import shutil
from collections import Counter

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
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from asyncrl.learner.activations import checkpoint_activations
from asyncrl.learner.attention import ATTENTION_NAME, GroupLayout, group_attention
from asyncrl.learner.model import decoder_blocks, load_packed

EVERY_GROUP = [[[0, 1, 2, 3, 4]]]


def gradients_with(path, store, **options):
    with one_rank(path, sgd_config(**options), store) as learner:
        gradients = record_gradients(learner)
        learner.update(shard_of(uneven_groups(), EVERY_GROUP))
    return gradients


@pytest.mark.parametrize(("mode", "attention_calls"), [("selective", 2), ("full", 2), ("none", 1)])
def test_checkpointed_activations_give_the_same_bits_and_keep_the_names(
    tmp_path, monkeypatch, mode, attention_calls
):
    # Mutations caught: a wrapper that renames parameters (nothing would be published); an option that does nothing
    # (the attention of each of the two blocks runs once).
    calls = []

    def counted(*arguments, **options):
        calls.append(1)
        return group_attention(*arguments, **options)

    path = write_model(tmp_path / "model", "llama", tied=True)
    expected = gradients_with(path, tmp_path / "plain", activation_checkpointing="none")
    monkeypatch.setitem(AttentionInterface._global_mapping, ATTENTION_NAME, counted)
    found = gradients_with(path, tmp_path / "checkpointed", activation_checkpointing=mode)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(calls) == 2 * 2 + 2 * attention_calls  # the check of the head runs both blocks twice


@pytest.mark.parametrize(
    ("mode", "products", "activations"), [("none", 7, 1), ("selective", 7, 2), ("full", 13, 2)]
)
def test_selective_checkpointing_computes_no_matrix_product_again(tmp_path, mode, products, activations):
    # Mutations caught: a product that is not kept; an activation function that is. `full` stops before the block's
    # last product, whose result nothing needs.
    block = decoder_blocks(load_packed(write_model(tmp_path / "model", "llama", tied=True)).get_decoder())[0]
    assert isinstance(block, nn.Module)
    checkpoint_activations(block, mode)
    seen = Counter[str]()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen[str(func)] += 1
            return func(*args, **(kwargs or {}))

    hidden = torch.randn(1, 9, 32, requires_grad=True)
    rotary = torch.ones(1, 9, 8), torch.zeros(1, 9, 8)
    layout = GroupLayout([(4, [3, 2])], torch.device("cpu"))
    with Count():
        out = block(hidden, position_embeddings=rotary, group_layout=layout)
        forward_products = seen["aten.mm.default"]
        out.sum().backward()
    assert forward_products == 7
    assert seen["aten.mm.default"] - 2 * 7 == products
    assert seen["aten.silu.default"] == activations


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_blocks_give_the_same_gradients(tmp_path):
    # Mutation caught: compile with static shapes (every microbatch would compile anew and at last fall back).
    path = write_model(tmp_path / "model", "llama", tied=True)
    expected = gradients_with(path, tmp_path / "plain")
    assert_gradients_close(gradients_with(path, tmp_path / "compiled", compile=True), expected)
