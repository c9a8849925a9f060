"""What a decoder block keeps for its backward pass, and what it computes again there.

`selective` keeps the results of matrix products and of attention kernels, which are dear, and computes norms, rotary
embeddings, activation functions and copies again, which are cheap and make up half of what a block would keep.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # registers torch_attn
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_aten: Any = torch.ops.aten
KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
}


def checkpoint_activations(block: nn.Module, mode: Literal["none", "selective", "full"]) -> None:
    """Changes `block.forward`, before FSDP takes the block. Gradients stay the same bits on a CPU.

    The method and not a wrapper around the block: names of parameters stay Hugging Face's.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # dropout is off
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    block.forward = partial(checkpoint, block.forward, **options)


def _policy(_context: Any, operator: Any, *_arguments: Any, **_options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
