"""LoRA: adapters train, the model beneath them does not, and what leaves the learner is the merged model."""

from __future__ import annotations

import json

import pytest
import torch
from learner_cases import one_rank, sgd_config, shard_of, uneven_groups, weights, write_model
from peft import LoraConfig as PeftConfig
from peft import PeftModel
from transformers import AutoModelForCausalLM

from asyncrl.config import Config
from asyncrl.config.learner import LoraTable
from asyncrl.learner.experience import receive_shard

EVERY_GROUP = [[[0, 1, 2, 3, 4]]]
CPU = torch.device("cpu")


def lora_config(**algorithm: object) -> Config:
    table = LoraTable(rank=3, alpha=12)
    config = sgd_config(lr=0.5, lora=table.model_dump())
    return Config.model_validate(config.model_dump() | {"algorithm": algorithm or "grpo"}, strict=False)


def base_weights(learner) -> dict[str, torch.Tensor]:
    named = learner._models.policy.transformer.named_parameters()
    return {name: p.to_local().clone() for name, p in named if "lora_" not in name}


def test_version_0_is_the_model_itself_and_training_leaves_the_base_weights_as_they_are(tmp_path):
    # Mutations caught: B drawn at random; an optimizer over all parameters; the merged weights written back.
    path = write_model(tmp_path / "model", "llama", tied=True)
    original = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
    with one_rank(path, lora_config(), tmp_path / "store") as learner:
        published = weights(learner)
        assert {n: tuple(t.shape) for n, t in published.items()} == {
            n: tuple(t.shape) for n, t in original.items()
        }
        assert all(torch.equal(published[name], original[name]) for name in original)
        before = base_weights(learner)
        metrics = learner.update(shard_of(uneven_groups(), EVERY_GROUP))
        after, merged = base_weights(learner), weights(learner)
    assert metrics["actor/grad_norm"] > 0
    assert all(torch.equal(before[name], after[name]) for name in before)
    moved = {name for name in original if not torch.equal(merged[name], original[name])}
    assert moved == {name for name in original if name.endswith("_proj.weight")}


def test_the_published_rows_are_peft_merged_weights_and_the_adapter_reloads_in_peft(tmp_path):
    # Mutations caught: alpha / rank left out; A and B exchanged; adapter names that peft does not know (it would load
    # nothing and warn).
    path = write_model(tmp_path / "model", "qwen2", tied=False)
    with one_rank(path, lora_config(), tmp_path / "store") as learner:
        for _ in range(2):
            learner.update(shard_of(uneven_groups(), EVERY_GROUP))
        merged = weights(learner)
        learner.export(tmp_path / "run" / "model")
    exported = dict(
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype="auto").named_parameters()
    )
    assert all(torch.equal(exported[name], merged[name]) for name in merged)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    by_peft = PeftModel.from_pretrained(base, tmp_path / "run" / "adapter").merge_and_unload()
    found = dict(by_peft.named_parameters())
    original = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
    for name, tensor in merged.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6)
    key = "model.layers.1.self_attn.q_proj.weight"
    assert (found[key] - original[key]).abs().max() > 1e-3
    saved = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"]) == (3, 12)
    assert PeftConfig.from_pretrained(tmp_path / "run" / "adapter").task_type == "CAUSAL_LM"


def test_the_published_model_scores_as_the_one_with_adapters(tmp_path):
    # Mutation caught: rollout servers given the base model.
    path = write_model(tmp_path / "model", "llama", tied=False)
    with one_rank(path, lora_config(), tmp_path / "store") as learner:
        shard = shard_of(uneven_groups(), EVERY_GROUP)
        learner.update(shard)
        (microbatch,) = receive_shard(shard, CPU).microbatches()
        with_adapters, _ = learner._models.score(microbatch)
        learner.export(tmp_path / "model2")
    with one_rank(tmp_path / "model2", sgd_config(), tmp_path / "store2") as plain:
        merged, _ = plain._models.score(microbatch)
    torch.testing.assert_close(merged, with_adapters, rtol=1e-5, atol=1e-5)


def test_the_reference_is_the_model_beneath_the_adapters(tmp_path):
    # Mutations caught: the reference with the adapters on; the adapters left off afterwards.
    path = write_model(tmp_path / "model", "llama", tied=True)
    config = lora_config(type="grpo", loss={"kl": {"coef": 0.1}})
    with one_rank(path, config, tmp_path / "store") as learner:
        shard = shard_of(uneven_groups(), EVERY_GROUP)
        (microbatch,) = receive_shard(shard, CPU).microbatches()
        at_start, _ = learner._models.score(microbatch)
        assert learner.update(shard)["actor/kl"] == 0.0
        trained, _ = learner._models.score(microbatch)
        assert torch.equal(learner._models.reference_logprobs(microbatch), at_start)
        assert torch.equal(learner._models.score(microbatch)[0], trained)
        assert (trained - at_start).abs().max() > 1e-2
        assert learner.update(shard)["actor/kl"] > 0.0


def test_a_target_that_is_no_layer_is_refused(tmp_path):
    path = write_model(tmp_path / "model", "llama", tied=True)
    config = sgd_config(lora={"target_modules": ("no_proj",)})
    with pytest.raises(ValueError, match="no_proj"), one_rank(path, config, tmp_path / "store"):
        pass
