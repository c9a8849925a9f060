"""Norms and feed-forward parts that keep less give what the model's own give."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from asyncrl.learner.lean_blocks import keep_less

SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 8,
}
SIZES |= {"num_hidden_layers": 1, "vocab_size": 11, "attn_implementation": "eager"}
NUM_TOKENS = 13


def block_of(kind: str) -> nn.Module:
    torch.manual_seed(4)
    classes: dict[str, Any] = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "gemma": (GemmaConfig, GemmaForCausalLM),
    }
    make_config, make_model = classes[kind]
    block = make_model(make_config(**SIZES)).model.layers[0]
    for parameter in block.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return block


def run(block: nn.Module) -> tuple[list[Tensor], int]:
    """Output and every gradient; the elements that were kept for the backward pass, once a storage."""
    dtype = next(block.parameters()).dtype
    generator = torch.Generator().manual_seed(1)
    x, upstream = (torch.randn(1, NUM_TOKENS, 24, generator=generator).to(dtype) for _ in range(2))
    x.requires_grad_()
    angles = torch.randn(1, NUM_TOKENS, 8, generator=generator)
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage()).data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes() // tensor.itemsize
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        rotary = (angles.cos().to(dtype), angles.sin().to(dtype))
        out = block(x, position_embeddings=rotary, attention_mask=None)
        out = out[0] if isinstance(out, tuple) else out
    return [out.detach(), *torch.autograd.grad(out, [x, *block.parameters()], upstream)], sum(kept.values())


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_block_that_keeps_less_has_the_same_output_and_gradients(kind: str):
    # Mutations caught: the norm's gradient without the share of its own scale; silu's derivative at the product; a
    # gradient of up without the activation; a weight's gradient from the gate alone; the activation kept.
    own = block_of(kind)
    lean = copy.deepcopy(own)
    keep_less(lean)
    (expected, own_kept), (found, kept) = run(own), run(lean)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert own_kept - kept >= NUM_TOKENS * (2 * SIZES["intermediate_size"] + 2 * SIZES["hidden_size"])
    assert [name for name, _ in lean.named_parameters()] == [name for name, _ in own.named_parameters()]


def test_a_module_that_computes_something_else_keeps_its_own_method():
    # Gemma's norm multiplies with 1 + weight, its activation is GELU. Mutation caught: going by the class's name.
    own = block_of("gemma")
    lean = copy.deepcopy(own)
    keep_less(lean)
    assert not [name for name, module in lean.named_modules() if "forward" in vars(module)]
    assert all(torch.equal(a, b) for a, b in zip(run(lean)[0], run(own)[0], strict=True))


def test_a_last_product_that_is_more_than_one_is_left_to_its_module():
    # Adapters, and layers that tensor ranks share. Mutation caught: its weight read past it.
    block = block_of("llama")
    keep_less(block)
    calls: list[int] = []
    block.mlp.down_proj.register_forward_hook(lambda *_: calls.append(1))
    run(block)
    assert calls == [1]


def test_bfloat16_is_as_near_to_float32_as_the_models_own():
    # Mutations caught: the norm, or its gradient, in bfloat16.
    own = block_of("llama")
    lean = copy.deepcopy(own)
    keep_less(lean)
    exact, found, theirs = run(own)[0], run(lean.bfloat16())[0], run(own.bfloat16())[0]

    def error(results: list[Tensor], i: int) -> float:
        return float((results[i].float() - exact[i]).norm() / exact[i].norm())

    for i in range(len(exact)):
        assert error(found, i) <= 1.2 * error(theirs, i)
