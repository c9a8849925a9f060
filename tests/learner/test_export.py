"""The exported folder is a Hugging Face model: the trained weights, and the companions as they came."""

from __future__ import annotations

import json

import pytest
import torch
from learner_cases import one_rank, sgd_config, shard_of, uneven_groups, weights, write_model
from transformers import AutoModelForCausalLM

from asyncrl.errors import LearnerError


@pytest.mark.parametrize(
    ("tied", "dtype"), [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)]
)
def test_exported_model_reloads_bitwise(tmp_path, tied, dtype):
    # Mutations caught: exporting the initial weights; a head that is saved twice or not at all; float32 files
    # under a bfloat16 config.
    path = write_model(tmp_path / "model", "llama", tied, dtype)
    (path / "tokenizer_config.json").write_text('{"marker": 1}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    folder = tmp_path / "runs" / "exported"
    with one_rank(path, sgd_config(), tmp_path / "store") as learner:
        initial = weights(learner)
        learner.update(shard_of(uneven_groups(), [[[0, 1, 2, 3, 4]]]))
        trained = weights(learner)
        learner.export(folder)
    assert not torch.equal(initial["model.embed_tokens.weight"], trained["model.embed_tokens.weight"])
    reloaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    found = dict(reloaded.named_parameters())
    assert set(found) == set(trained)
    for name, tensor in trained.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor.to(dtype)), name
    assert (folder / "tokenizer_config.json").read_text() == '{"marker": 1}'
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is tied
    assert [p.name for p in folder.parent.iterdir()] == ["exported"]


def test_an_existing_folder_is_not_overwritten(tmp_path):
    path = write_model(tmp_path / "model", "llama", tied=True)
    with (
        one_rank(path, sgd_config(), tmp_path / "store") as learner,
        pytest.raises(LearnerError, match="exists already"),
    ):
        learner.export(path)
