"""Several optimizer steps a batch: mini-batches and epochs against a plain loop over padded rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from learner_cases import (
    one_rank,
    plain_model,
    plain_steps,
    plain_tokens,
    sgd_config,
    shard_of_minibatches,
    uneven_groups,
    weights,
    write_model,
)

from asyncrl.algorithms.losses.policy import LossTokens
from asyncrl.errors import LearnerError
from asyncrl.learner import loss

WHOLE = [[[[0, 1, 2, 3, 4]]]]
HALVES = [[[[0, 2, 4]]], [[[1, 3]]]]
HALVES_IN_PIECES = [[[[4], [], [0, 2]]], [[[3], [1]]]]
HALVES_IN_OTHER_PIECES = [[[[0], [2], [4]]], [[[], [1, 3], []]]]


def taken(groups, minibatches):
    """[mini-batch] -> groups, of one rank."""
    return [[groups[p] for microbatch in of_ranks[0] for p in microbatch] for of_ranks in minibatches]


def recorded_batches(monkeypatch: pytest.MonkeyPatch) -> list[LossTokens]:
    """Filled with what each microbatch's loss is given."""
    batches: list[LossTokens] = []
    objective = loss.objective

    def record(config: Any, tokens: LossTokens, counts: Any) -> Any:
        batches.append(tokens)
        return objective(config, tokens, counts)

    monkeypatch.setattr(loss, "objective", record)
    return batches


# Mutations caught: proximal log-probs of the step instead of the batch's start (no ratio would differ from 1);
# a loss divided by the batch's tokens instead of the mini-batch's; gradients that pile up over steps; one step at
# the end; a warm-up that counts steps (batch 1 of 4 warm-up versions: half of lr, in every step); sums that are
# averaged over steps, or over one epoch's tokens.
@pytest.mark.parametrize("num_epochs", [1, 2, 3])
@pytest.mark.parametrize("minibatches", [WHOLE, HALVES, HALVES_IN_PIECES, HALVES_IN_OTHER_PIECES], ids=str)
def test_the_steps_are_those_of_a_plain_loop_whatever_the_microbatches(tmp_path, minibatches, num_epochs):
    path = write_model(tmp_path / "model", "llama", tied=True)
    groups = uneven_groups()
    expected, expected_metrics = plain_steps(
        path, taken(groups, minibatches), num_epochs=num_epochs, lr=0.15, temperature=0.7
    )
    config = sgd_config(lr=0.3, warmup_versions=4)
    with one_rank(path, config, tmp_path / "store") as learner:
        before = weights(learner)
        metrics = learner.update(shard_of_minibatches(groups, minibatches, num_epochs=num_epochs, index=1))
        after = weights(learner)
    assert metrics["actor/lr"] == 0.15
    for name, tensor in expected.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-5, atol=1e-6)
        assert (tensor - before[name]).norm() > 1e-3, f"{name} moved too little to prove anything"
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    if len(minibatches) * num_epochs > 1:
        assert metrics["actor/pg_clipfrac"] > 0
        assert metrics["actor/ppo_kl"] != 0


def test_every_step_compares_with_the_learner_before_the_first(tmp_path, monkeypatch):
    # Mutations caught: the forward pass taken after the first step, or once an epoch; log-probs of the first
    # mini-batch taken anew in the second epoch; microbatches' log-probs exchanged.
    path = write_model(tmp_path / "model", "qwen2", tied=False)
    groups = uneven_groups()
    model = plain_model(path)
    at_start = [plain_tokens(model, half, 0.7).logprobs.detach() for half in taken(groups, HALVES)]
    with one_rank(path, sgd_config(lr=0.1), tmp_path / "store") as learner:
        batches = recorded_batches(monkeypatch)
        metrics = learner.update(shard_of_minibatches(groups, HALVES, num_epochs=2))
    assert len(batches) == 4
    for batch, expected in zip(batches, at_start * 2, strict=True):
        torch.testing.assert_close(batch.proximal_logprobs, expected, rtol=0, atol=1e-5)
        assert not batch.proximal_logprobs.requires_grad
    moved = [float((b.learner_logprobs.detach() - b.proximal_logprobs).abs().max()) for b in batches]
    assert moved[0] == 0.0
    assert all(difference > 1e-2 for difference in moved[1:])
    for first, second in zip(batches[:2], batches[2:], strict=True):
        assert torch.equal(first.advantages, second.advantages)
    assert metrics["mismatch/logprob_diff_max"] == pytest.approx(
        max(float((b.proximal_logprobs - b.rollout_logprobs).abs().max()) for b in batches)
    )


def test_only_mini_batches_after_the_first_are_scored_ahead(tmp_path):
    # Mutation caught: a forward pass for one step a batch, or for epochs of a single mini-batch.
    path = write_model(tmp_path / "model", "llama", tied=True)
    groups = uneven_groups()
    with one_rank(path, sgd_config(), tmp_path / "store") as learner:
        modes: list[bool] = []
        learner._models.policy.register_forward_pre_hook(lambda *_: modes.append(torch.is_grad_enabled()))
        for minibatches, num_epochs, expected in (
            (WHOLE, 1, [True]),
            (WHOLE, 3, [True] * 3),
            (HALVES_IN_PIECES, 1, [False] * 2 + [True] * 5),
        ):
            modes.clear()
            metrics = learner.update(shard_of_minibatches(groups, minibatches, num_epochs=num_epochs))
            assert modes == expected
            assert ("timing_s/old_log_prob" in metrics) is (len(minibatches) > 1)


def test_a_step_that_is_not_finite_is_named_and_changes_nothing(tmp_path):
    # Mutation caught: the check only before the first step.
    path = write_model(tmp_path / "model", "llama", tied=True)
    groups = uneven_groups()
    first, _ = plain_steps(path, [[groups[0], groups[2], groups[4]]], num_epochs=1, lr=0.01, temperature=0.7)
    groups[3].trajectories[0].rollout_logprobs[0] = math.nan
    with one_rank(path, sgd_config(lr=0.01), tmp_path / "store") as learner:
        with pytest.raises(LearnerError, match=r"version 6 is nan in step 2 .*this step was not taken"):
            learner.update(shard_of_minibatches(groups, HALVES, index=6))
        after = weights(learner)
    for name, tensor in first.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_mini_batch_without_a_trained_token_is_refused_before_any_step(tmp_path):
    # Mutation caught: the check only for the whole batch (the step would divide by 0).
    path = write_model(tmp_path / "model", "llama", tied=True)
    groups = uneven_groups()
    for position in (1, 3):
        for t in groups[position].trajectories:
            t.loss_mask[:] = 0
    with one_rank(path, sgd_config(), tmp_path / "store") as learner:
        before = weights(learner)
        with pytest.raises(LearnerError, match="mini-batch 1 of batch 0 has no trained token"):
            learner.update(shard_of_minibatches(groups, HALVES))
        after = weights(learner)
    assert all(torch.equal(after[name], before[name]) for name in before)
