"""Writes the trained model in Hugging Face format: config, safetensors, and the tokenizer as it came."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel

from asyncrl.errors import LearnerError
from asyncrl.models.companions import copy_companions


def export_model(
    transformer: PreTrainedModel, model_path: Path, folder: Path, *, dtype: torch.dtype, is_writer: bool
) -> None:
    """Gathers the sharded model, tensor by tensor, and writes it to `folder` on the rank that is the writer.

    `dtype`: the publish dtype, so that the folder holds bit for bit what the engines served and what was
    evaluated. Collective: every rank holds one full tensor at a time, the writer all of them in host memory.
    The folder appears at once, complete. Raises LearnerError on the writer when `folder` exists.
    """
    config = AutoConfig.from_pretrained(model_path)
    state: dict[str, Tensor] = {}
    for name, parameter in transformer.named_parameters():
        sharded: Tensor = parameter
        assert isinstance(sharded, DTensor)
        tensor = sharded.full_tensor().detach()
        if is_writer:
            # A copy: a gathered tensor may be a view of a padded buffer, or the parameter itself.
            state[name] = torch.empty(tensor.shape, dtype=dtype).copy_(tensor)
    if not is_writer:
        return
    if folder.exists():
        raise LearnerError(f"{folder} exists already; export to another folder")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_torch_state_dict(state, partial, safe_serialization=True)
    config.dtype = dtype
    config.save_pretrained(partial)
    copy_companions(model_path, partial)
    os.replace(partial, folder)
