"""PolicyLearner on one rank: gradients, steps, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from learner_cases import (
    assert_gradients_close,
    one_rank,
    plain_rows,
    record_gradients,
    sgd_config,
    shard_of,
    trajectory,
    uneven_groups,
    weights,
    write_model,
)
from transformers import GraniteConfig, GraniteForCausalLM

from asyncrl.config import Config, LearnerConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.model import output_head
from asyncrl.learner.optimizer import learning_rate
from asyncrl.types import TrajectoryGroup

EVERY_GROUP = [[[0, 1, 2, 3, 4]]]


# Mutations caught: a mean over microbatches instead of the batch's token mean; an empty microbatch that counts.
@pytest.mark.parametrize(
    "microbatches", [EVERY_GROUP, [[[4, 0], [2], [1, 3]]], [[[0], [], [1], [2], [3], [4]]]], ids=str
)
def test_gradients_and_sgd_weights_depend_on_no_microbatching(tmp_path, microbatches):
    path = write_model(tmp_path / "model", "llama", tied=True)
    groups = uneven_groups()
    _, expected = plain_rows(path, groups, temperature=0.7)
    with one_rank(path, sgd_config(), tmp_path / "store") as learner:
        before, gradients = weights(learner), record_gradients(learner)
        metrics = learner.update(shard_of(groups, microbatches))
        after = weights(learner)
    assert_gradients_close(gradients, expected)
    moves = {name: (before[name] - after[name]) / 0.5 for name in before}
    assert_gradients_close(moves, expected, rtol=1e-4)
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in expected.values()))
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["actor/lr"] == 0.5
    assert metrics["actor/ppo_kl"] == metrics["actor/pg_clipfrac"] == 0.0


def test_metrics_are_token_means_over_the_whole_batch(tmp_path):
    # Mutation caught: averaging the microbatches' means.
    path = write_model(tmp_path / "model", "llama", tied=True)
    groups = uneven_groups()
    logprobs, _ = plain_rows(path, groups, temperature=0.7)
    rollout = torch.cat(
        [torch.from_numpy(t.rollout_logprobs[t.loss_mask == 1]) for g in groups for t in g.trajectories]
    )
    difference = logprobs - rollout
    with one_rank(path, sgd_config(), tmp_path / "store") as learner:
        metrics = learner.update(shard_of(groups, [[[0], [1, 2], [], [3, 4]]]))
    expected = {
        "mismatch/k1": -difference.mean(),
        "mismatch/k3": (difference.exp() - 1 - difference).mean(),
        "mismatch/logprob_diff_max": difference.abs().max(),
        "correction/weight_mean": difference.exp().clamp(max=2.0).mean(),
        "correction/weight_max": difference.exp().clamp(max=2.0).max(),
        "correction/truncated_share": (difference.exp() > 2.0).float().mean(),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-4), name


def test_same_input_gives_bitwise_the_same_weights(tmp_path):
    # Mutation caught: dropout left on, or any unseeded randomness in the step.
    path = write_model(tmp_path / "model", "qwen2", tied=False)
    results = []
    for attempt in range(2):
        config = Config.model_validate({"learner": {"lr": 1e-2}})
        with one_rank(path, config, tmp_path / f"store{attempt}") as learner:
            for index in range(3):
                learner.update(shard_of(uneven_groups(), [[[0, 1], [2, 3, 4]]], index=index))
            results.append(weights(learner))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_gradients_are_clipped_to_the_global_norm(tmp_path):
    # Mutation caught: clipping each tensor by itself, or not at all.
    path = write_model(tmp_path / "model", "llama", tied=True)
    with one_rank(path, sgd_config(max_grad_norm=0.01, lr=1.0), tmp_path / "store") as learner:
        before = weights(learner)
        metrics = learner.update(shard_of(uneven_groups(), EVERY_GROUP))
        after = weights(learner)
    assert metrics["actor/grad_norm"] > 0.02
    moved = math.sqrt(sum(float((after[name] - before[name]).double().square().sum()) for name in before))
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_a_non_finite_gradient_is_an_error_and_moves_no_weight(tmp_path):
    # Mutations caught: stepping before the check; nan_to_num somewhere on the way; gradients left for next time.
    path = write_model(tmp_path / "model", "llama", tied=True)
    groups, poisoned = uneven_groups(), uneven_groups()
    poisoned[2].trajectories[0].rollout_logprobs[1] = math.nan
    with one_rank(path, sgd_config(), tmp_path / "store") as learner:
        before = weights(learner)
        with pytest.raises(
            LearnerError,
            match=r"version 7 is nan in step 1 \(first in transformer\.model\.embed_tokens\.weight\)",
        ):
            learner.update(shard_of(poisoned, EVERY_GROUP, index=7))
        after = weights(learner)
        assert all(torch.equal(after[name], before[name]) for name in before)
        gradients = record_gradients(learner)
        learner.update(shard_of(groups, EVERY_GROUP, index=7))
    assert_gradients_close(gradients, plain_rows(path, groups, temperature=0.7)[1])


def test_a_non_finite_weight_is_found_and_named(tmp_path):
    path = write_model(tmp_path / "model", "llama", tied=True)
    for value in (math.nan, math.inf):
        with one_rank(path, sgd_config(), tmp_path / f"store{value}") as learner:
            learner.check_finite()
            shard = next(s for s in learner.named_shards() if s.name == "model.layers.1.mlp.up_proj.weight")
            shard.rows[3, 2] = value
            with pytest.raises(LearnerError, match=r"model\.layers\.1\.mlp\.up_proj\.weight are not finite"):
                learner.check_finite()


def test_a_shard_that_is_not_its_share_of_the_plan_is_refused(tmp_path):
    path = write_model(tmp_path / "model", "llama", tied=True)
    groups = uneven_groups()
    with one_rank(path, sgd_config(), tmp_path / "store") as learner:
        swapped = shard_of(groups, EVERY_GROUP)
        swapped.groups.reverse()
        with pytest.raises(LearnerError, match=r"the plan of batch 0 gives it \[10, 13, 16, 19, 22\]"):
            learner.update(swapped)
        nothing = shard_of([], [[[]]])
        with pytest.raises(LearnerError, match="mini-batch 0 of batch 0 has no trained token"):
            learner.update(nothing)


def test_tied_head_is_one_tensor_before_and_after_a_step(tmp_path):
    # Mutation caught: sharding the head apart from the embedding, which unties them (each gets half the gradient).
    path = write_model(tmp_path / "model", "llama", tied=True)
    with one_rank(path, sgd_config(), tmp_path / "store") as learner:
        learner.update(shard_of(uneven_groups(), EVERY_GROUP))
        transformer = learner._models.policy.transformer
        embedding, head = transformer.get_input_embeddings().weight, output_head(transformer).weight
        assert head.to_local().data_ptr() == embedding.to_local().data_ptr()
        names = [shard.name for shard in learner.named_shards()]
    assert names[0] == "model.embed_tokens.weight"
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names)) == 20


def test_a_checkpoint_that_unties_the_head_is_refused(tmp_path):
    path = write_model(tmp_path / "model", "llama", tied=False)
    config_file = path / "config.json"
    config_file.write_text(
        config_file.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    )
    with (
        pytest.raises(LearnerError, match="loaded as two tensors"),
        one_rank(path, sgd_config(), tmp_path / "store"),
    ):
        pass


def test_a_sliding_window_is_refused(tmp_path):
    path = write_model(tmp_path / "model", "qwen2", tied=True)
    config_file = path / "config.json"
    text = config_file.read_text().replace('"use_sliding_window": false', '"use_sliding_window": true')
    config_file.write_text(text.replace('"sliding_window": null', '"sliding_window": 16'))
    with (
        pytest.raises(LearnerError, match="sliding window of 16 tokens"),
        one_rank(path, sgd_config(), tmp_path / "store"),
    ):
        pass


def test_a_model_that_scales_its_logits_is_refused(tmp_path):
    # Mutation caught: no check -> log-probs of a distribution 8 times as sharp as the one that was sampled.
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = GraniteConfig(vocab_size=64, num_key_value_heads=2, logits_scaling=8.0, **sizes)
    GraniteForCausalLM(config).save_pretrained(tmp_path / "model")
    with (
        pytest.raises(LearnerError, match="granite does something to its logits after the head"),
        one_rank(tmp_path / "model", sgd_config(), tmp_path / "store"),
    ):
        pass


def test_the_first_of_n_warm_up_steps_uses_an_nth_of_lr():
    # Mutation caught: starting at 0, where the first batch would be trained for nothing.
    config = LearnerConfig(lr=0.8, warmup_versions=4)
    assert [learning_rate(config, version) for version in range(6)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 0.8, 0.8]
    )
    assert learning_rate(LearnerConfig(lr=0.8), 0) == 0.8


def test_adamw_moves_each_weight_by_the_warm_up_rate_first(tmp_path):
    # The first AdamW step is lr * sign(gradient): shows that `update` hands the version to the schedule.
    path = write_model(tmp_path / "model", "llama", tied=True)
    config = Config.model_validate({"learner": {"lr": 1e-2, "warmup_versions": 4}})
    with one_rank(path, config, tmp_path / "store") as learner:
        before = weights(learner)
        metrics = learner.update(shard_of(uneven_groups(), EVERY_GROUP, index=1))
        after = weights(learner)
    assert metrics["actor/lr"] == 5e-3
    name = "model.layers.0.mlp.down_proj.weight"
    assert float((after[name] - before[name]).abs().median()) == pytest.approx(5e-3, rel=1e-3)


def test_a_single_trajectory_trains_nothing_and_gives_no_nan(tmp_path):
    # A group of one has advantage 0: the step is 0, finite, and counted.
    path = write_model(tmp_path / "model", "llama", tied=True)
    rng = np.random.default_rng(0)
    group = TrajectoryGroup(0, 0, np.array([1, 2], np.int32), [trajectory(rng, [1, 1], 0.7)])
    with one_rank(path, sgd_config(), tmp_path / "store") as learner:
        before = weights(learner)
        metrics = learner.update(shard_of([group], [[[0]]]))
        after = weights(learner)
    assert metrics["actor/grad_norm"] == 0.0
    assert all(torch.equal(after[name], before[name]) for name in before)
