"""LoRA (arXiv:2106.09685) through peft: small matrices are trained beside the model's, which stay as they are.

What is published, evaluated and exported is the merged model: rows of W + scaling * B A, computed for one tensor at a
time. FSDP2 shards W and B alike by rows, so a rank merges its own rows and needs only A whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from asyncrl.config.learner import LoraTable

ADAPTER = "default"
BASE = ".base_layer"
"""peft puts it into the name of every matrix that has an adapter."""


def add_adapters(transformer: PreTrainedModel, table: LoraTable, seed: int) -> None:
    """Freezes the model and puts adapters on its linear layers, B at 0: version 0 is the model as it was.

    The same numbers on every rank: A is drawn from `seed`. Raises ValueError (peft's) for a target that is not there.
    """
    torch.manual_seed(seed)
    inject_adapter_in_model(lora_config(table), transformer, adapter_name=ADAPTER)


def lora_config(table: LoraTable) -> LoraConfig:
    targets = table.target_modules
    return LoraConfig(
        r=table.rank,
        lora_alpha=table.alpha,
        target_modules=targets[0] if targets == ("all-linear",) else list(targets),
        task_type="CAUSAL_LM",
    )


def adapted_layers(transformer: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """(name as Hugging Face has it, layer) of each layer with an adapter."""
    for name, module in transformer.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def merged_rows(layer: LoraLayer, rows: Tensor) -> Tensor:
    """rows [n, in], this rank's of the base weight -> the same of the merged one. Collective."""
    a, b = _weight(layer.lora_A), _weight(layer.lora_B)
    whole_a = a.full_tensor().detach()
    return torch.addmm(rows, b.to_local().detach(), whole_a, alpha=layer.scaling[ADAPTER])


@contextmanager
def without_adapters(transformer: nn.Module) -> Iterator[None]:
    """Inside, the model is the one that it was before training: the reference of KL terms, at no memory."""
    layers = [layer for _, layer in adapted_layers(transformer)]
    scalings = [layer.scaling[ADAPTER] for layer in layers]
    for layer in layers:
        layer.scaling[ADAPTER] = 0.0
    try:
        yield
    finally:
        for layer, scaling in zip(layers, scalings, strict=True):
            layer.scaling[ADAPTER] = scaling


def save_adapter(
    transformer: nn.Module, table: LoraTable, model_name: str, folder: Path, *, is_writer: bool
) -> None:
    """The adapter alone, as peft reads it: PeftModel.from_pretrained(base, folder). Collective."""
    state: dict[str, Tensor] = {}
    for name, layer in adapted_layers(transformer):
        for part, weights in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
            tensor = _weight(weights).full_tensor().detach()
            if is_writer:
                state[f"base_model.model.{name}.{part}.weight"] = tensor.float().cpu().clone()
    if is_writer:
        folder.mkdir(parents=True)
        save_file(state, folder / "adapter_model.safetensors", {"format": "pt"})
        config = lora_config(table).to_dict() | {
            "base_model_name_or_path": model_name,
            "inference_mode": True,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, default=sorted) + "\n")


def _weight(weights: nn.ModuleDict) -> DTensor:
    weight = weights[ADAPTER].weight
    assert isinstance(weight, DTensor)
    return weight
