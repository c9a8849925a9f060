"""The exported folder is a Hugging Face model: the trained weights, and the companions as they came."""

from __future__ import annotations

import json

import pytest
import torch
from learner_cases import one_rank, sgd_config, shard_of, uneven_groups, weights, write_model
from transformers import AutoModelForCausalLM

from asyncrl.config import WeightSyncConfig
from asyncrl.errors import LearnerError


@pytest.mark.parametrize(
    ("tied", "original", "published"),
    [
        (True, torch.float32, torch.float32),
        (False, torch.float32, torch.bfloat16),
        (True, torch.bfloat16, torch.float32),
    ],
)
def test_exported_model_reloads_bitwise_in_the_publish_dtype(tmp_path, tied, original, published):
    # Mutations caught: exporting the initial weights; a head that is saved twice or not at all; the original
    # checkpoint's dtype (what was served and evaluated would be rounded, or a config would lie about its files).
    path = write_model(tmp_path / "model", "llama", tied, original)
    (path / "tokenizer_config.json").write_text('{"marker": 1}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    folder = tmp_path / "runs" / "exported"
    config = sgd_config().model_copy(
        update={"weight_sync": WeightSyncConfig(dtype=str(published).removeprefix("torch."))}
    )
    with one_rank(path, config, tmp_path / "store") as learner:
        initial = weights(learner)
        learner.update(shard_of(uneven_groups(), [[[0, 1, 2, 3, 4]]]))
        trained = weights(learner)
        learner.export(folder)
    assert not torch.equal(initial["model.embed_tokens.weight"], trained["model.embed_tokens.weight"])
    reloaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    found = dict(reloaded.named_parameters())
    assert set(found) == set(trained)
    for name, tensor in trained.items():
        assert found[name].dtype == published
        assert torch.equal(found[name], tensor.to(published)), name
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
