"""Packed groups give the log-probs and gradients of plain padded rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from learner_cases import (
    assert_gradients_close,
    hand_advantages,
    plain_rows,
    trajectory,
    uneven_groups,
    write_model,
)
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from asyncrl.algorithms.recipe import TokenBatch
from asyncrl.algorithms.registry import build_recipe
from asyncrl.config import GrpoConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.attention import ATTENTION_NAME
from asyncrl.learner.model import PolicyModel
from asyncrl.learner.packing import pack
from asyncrl.types import TrajectoryGroup

CPU = torch.device("cpu")


def unsharded_policy(model_path, temperature=0.7):
    transformer = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation=ATTENTION_NAME
    )
    return PolicyModel(transformer.eval(), temperature, chunk_tokens=7)


def packed_logprobs_and_gradients(model_path, microbatches):
    policy, recipe = unsharded_policy(model_path), build_recipe(GrpoConfig())
    num_trained = sum(group.num_trained_tokens for groups in microbatches for group in groups)
    logprobs = []
    for groups in microbatches:
        batch = pack(groups, [hand_advantages(group) for group in groups], CPU)
        found, entropy = policy(batch)
        tokens = TokenBatch(found, found.detach(), batch.rollout_logprobs, batch.advantages, entropy)
        (recipe.loss(tokens).loss / num_trained).backward()
        logprobs.append(found.detach())
    gradients = {name: p.grad for name, p in policy.transformer.named_parameters()}
    return torch.cat(logprobs), gradients


# Mutations caught: completions that see each other; positions that go on counting over the packed row; the first
# token predicted by the previous completion's last; keys of the wrong head; a prompt's gradient from one
# completion only; a mask shifted by one.
@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen2", False)])
def test_packed_groups_equal_plain_padded_rows(tmp_path, kind, tied):
    path = write_model(tmp_path / "model", kind, tied)
    groups = uneven_groups()
    expected_logprobs, expected_gradients = plain_rows(path, groups, temperature=0.7)
    logprobs, gradients = packed_logprobs_and_gradients(path, [groups])
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=1e-6)
    assert_gradients_close(gradients, expected_gradients)


def test_packing_stores_the_prompt_once_and_stops_before_the_last_trained_token():
    # The example of PackedMicrobatch: a mutation of predict_index by one, or of positions, changes these numbers.
    rng = np.random.default_rng(0)
    trajectories = [trajectory(rng, [1, 1, 1, 0], 1.0), trajectory(rng, [1, 1], 0.0)]
    trajectories[0].token_ids[:] = [7, 8, 2, 4]
    trajectories[1].token_ids[:] = [9, 2]
    group = TrajectoryGroup(0, 0, np.array([5, 6], np.int32), trajectories)
    batch = pack([group], [[0.5, -0.5]], CPU)
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 2]
    assert batch.predict_index.tolist() == [1, 2, 3, 1, 4]
    assert batch.target_ids.tolist() == [7, 8, 2, 9, 2]
    assert batch.advantages.tolist() == [0.5, 0.5, 0.5, -0.5, -0.5]
    expected = [*trajectories[0].rollout_logprobs[:3], *trajectories[1].rollout_logprobs]
    assert batch.rollout_logprobs.tolist() == expected


def test_what_is_behind_the_mask_cannot_matter(tmp_path):
    # Mutation caught: multiplying by the mask instead of leaving masked tokens out (inf * 0 is NaN).
    path = write_model(tmp_path / "model", "llama", tied=True)
    groups = uneven_groups()
    clean_logprobs, clean_gradients = packed_logprobs_and_gradients(path, [groups])
    for group in groups:
        for t in group.trajectories:
            t.rollout_logprobs[t.loss_mask == 0] = np.nan
    logprobs, gradients = packed_logprobs_and_gradients(path, [groups])
    assert torch.equal(logprobs, clean_logprobs)
    assert all(torch.equal(gradients[name], clean_gradients[name]) for name in gradients)


@pytest.mark.parametrize("has_untrained_group", [False, True])
def test_an_empty_microbatch_runs_and_adds_exactly_nothing(tmp_path, has_untrained_group):
    # Mutation caught: a dummy token that carries loss. Every parameter must still get a gradient, of 0, or
    # FSDP's collectives of this rank would fall out of step.
    policy = unsharded_policy(write_model(tmp_path / "model", "llama", tied=False))
    rng = np.random.default_rng(0)
    untrained = TrajectoryGroup(0, 0, np.array([1, 2], np.int32), [trajectory(rng, [0, 0], 1.0)])
    groups = [untrained] if has_untrained_group else []
    batch = pack(groups, [[1.0]] if has_untrained_group else [], CPU)
    logprobs, entropy = policy(batch)
    assert logprobs.shape == entropy.shape == (0,)
    sums = build_recipe(GrpoConfig()).loss(
        TokenBatch(logprobs, logprobs.detach(), batch.rollout_logprobs, batch.advantages, entropy)
    )
    sums.loss.backward()
    assert all(float(value) == 0.0 for value in (sums.sums | sums.maxima).values())
    for name, parameter in policy.transformer.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_an_empty_prompt_is_refused():
    rng = np.random.default_rng(0)
    group = TrajectoryGroup(41, 0, np.array([], np.int32), [trajectory(rng, [1], 1.0)])
    with pytest.raises(LearnerError, match="group 41 has an empty prompt"):
        pack([group], [[1.0]], CPU)


def test_attention_without_a_layout_or_with_extras_is_refused():
    # Mutation caught: falling back to some other attention, which would let groups see each other.
    config = LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation=ATTENTION_NAME)
    ids = torch.tensor([[1, 2]])
    with pytest.raises(LearnerError, match="without a group layout"):
        model(input_ids=ids)
    with pytest.raises(LearnerError, match="asks for sliding_window"):
        model(input_ids=ids, sliding_window=4)
