"""Packed groups give the log-probs and gradients of plain padded rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from learner_cases import (
    assert_gradients_close,
    plain_rows,
    shard_of,
    trajectory,
    uneven_groups,
    write_model,
)
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from asyncrl.algorithms.losses import Counts
from asyncrl.config import Config
from asyncrl.errors import LearnerError
from asyncrl.learner.attention import ATTENTION_NAME
from asyncrl.learner.experience import Experience, receive_shard
from asyncrl.learner.loss import policy_loss
from asyncrl.learner.model import PolicyModel
from asyncrl.learner.packing import pack
from asyncrl.learner.stages import StageContext, advantage, score
from asyncrl.learner.steps import counts_of
from asyncrl.learner.totals import Totals
from asyncrl.types import TrajectoryGroup

CPU = torch.device("cpu")
ALGORITHM = Config().resolved_algorithm


def unsharded_policy(model_path, temperature=0.7):
    transformer = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation=ATTENTION_NAME
    )
    return PolicyModel(transformer.eval(), temperature=temperature, chunk_tokens=7)


def received(groups, microbatches) -> Experience:
    """GRPO's columns of one mini-batch, `microbatches` being positions of groups; nothing is scored yet."""
    experience = receive_shard(shard_of(groups, [microbatches]), CPU)
    context = StageContext(ALGORITHM, None, None, [])
    for stage in (score, advantage):
        stage(experience, context)
    return experience


def packed_logprobs_and_gradients(model_path, groups):
    policy, microbatches = unsharded_policy(model_path), [list(range(len(groups)))]
    counts = counts_of(shard_of(groups, [microbatches]).plan, 0)
    experience = received(groups, microbatches)
    logprobs = []
    for microbatch in experience.microbatches():
        output = policy(microbatch.pack())
        experience.columns.score(microbatch.tokens, output.logprobs.detach())
        policy_loss(
            ALGORITHM, experience, microbatch, output, counts, Totals(), max_staleness=0
        ).loss.backward()
        logprobs.append(output.logprobs.detach())
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
    logprobs, gradients = packed_logprobs_and_gradients(path, groups)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=1e-6)
    assert_gradients_close(gradients, expected_gradients)


def test_packing_stores_the_prompt_once_and_stops_before_the_last_trained_token():
    # The example of PackedMicrobatch: a mutation of predict_index by one, or of positions, changes these numbers.
    rng = np.random.default_rng(0)
    trajectories = [trajectory(rng, [1, 1, 1, 0], 1.0), trajectory(rng, [1, 1], 0.0)]
    trajectories[0].token_ids[:] = [7, 8, 2, 4]
    trajectories[1].token_ids[:] = [9, 2]
    group = TrajectoryGroup(0, 0, np.array([5, 6], np.int32), trajectories)
    batch = pack([group], CPU)
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 2]
    assert batch.predict_index.tolist() == [1, 2, 3, 1, 4]
    assert batch.target_ids.tolist() == [7, 8, 2, 9, 2]
    columns = received([group], [[0]]).columns
    expected = [*trajectories[0].rollout_logprobs[:3], *trajectories[1].rollout_logprobs]
    assert columns.rollout_logprobs.tolist() == expected
    assert columns.positions.tolist() == [0, 1, 2, 0, 1]
    assert columns.advantages.tolist() == pytest.approx([0.7071] * 3 + [-0.7071] * 2, abs=1e-4)


def test_what_is_behind_the_mask_cannot_matter(tmp_path):
    # Mutation caught: multiplying by the mask instead of leaving masked tokens out (inf * 0 is NaN).
    path = write_model(tmp_path / "model", "llama", tied=True)
    groups = uneven_groups()
    clean_logprobs, clean_gradients = packed_logprobs_and_gradients(path, groups)
    for group in groups:
        for t in group.trajectories:
            t.rollout_logprobs[t.loss_mask == 0] = np.nan
    logprobs, gradients = packed_logprobs_and_gradients(path, groups)
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
    experience = received(groups, [list(range(len(groups)))])
    (microbatch,) = experience.microbatches()
    output = policy(microbatch.pack())
    assert output.logprobs.shape == output.entropy.shape == (0,)
    trained = Counts(tokens=7.0, trajectories=2.0, trained_trajectories=2.0, groups=1.0)
    loss = policy_loss(ALGORITHM, experience, microbatch, output, trained, Totals(), max_staleness=0).loss
    assert float(loss.detach()) == 0.0
    loss.backward()
    for name, parameter in policy.transformer.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_an_empty_prompt_is_refused():
    rng = np.random.default_rng(0)
    group = TrajectoryGroup(41, 0, np.array([], np.int32), [trajectory(rng, [1], 1.0)])
    with pytest.raises(LearnerError, match="group 41 has an empty prompt"):
        pack([group], CPU)


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
