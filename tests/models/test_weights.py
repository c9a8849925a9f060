"""A model is loaded whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import make_model
from safetensors.torch import load_file, save_file

from asyncrl.errors import ConfigError
from asyncrl.models.weights import load_causal_lm


@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_model_has_the_weights_of_its_folder(tied: bool, tmp_path: Path):
    # Mutation: a tied head, which the folder does not hold, counts as missing.
    made = make_model(tmp_path / "model", tied=tied)
    loaded = load_causal_lm(tmp_path / "model", dtype=torch.float32)
    for name, parameter in made.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.self_attn.q_proj.bias"])
def test_a_missing_weight_is_an_error_that_names_it(name: str, tmp_path: Path):
    # Mutation: load without looking at what was missing: it is drawn at random.
    made = tmp_path / "model"
    make_model(made, tied=False)
    file = made / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        load_causal_lm(made, dtype=torch.float32)
    assert f"{made} has no weights for {name} (missing: 1)" in str(caught.value)
