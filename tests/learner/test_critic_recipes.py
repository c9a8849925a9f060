"""PPO and KL penalties against plain loops: critics, references, what they do to rewards and losses."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from flow_cases import (
    HALVES,
    SCENARIOS,
    Scenario,
    random_head,
    shard_for,
)
from learner_cases import plain_model
from plain_loop import (
    PlainBatch,
    clipped,
    gae,
    grpo_advantages,
    plain_batch,
    plain_training,
    sgd,
    token_rewards,
)
from recipe_cases import Flow, assert_trained, default_loss, plainly_trained, tis, whitened
from torch import Tensor

from asyncrl.errors import LearnerError
from asyncrl.learner import stages
from asyncrl.learner.experience import receive_shard
from asyncrl.learner.steps import value_metrics
from asyncrl.types import TrajectoryGroup


@pytest.fixture
def flow(tmp_path: Path) -> Flow:
    return Flow.at(tmp_path)


class PlainCritic(torch.nn.Module):
    def __init__(self, model_path: Path) -> None:
        super().__init__()
        self.causal = plain_model(model_path)
        self.head = random_head(32)

    def values(self, groups: Sequence[TrajectoryGroup]) -> Tensor:
        return self.head(plain_batch(self.causal, groups, 0.7).hidden)[:, 0]


def value_loss(values: Tensor, old: Tensor, returns: Tensor) -> Tensor:
    """Clipped at 0.2, as ppo2's, [N]."""
    cut = old + (values - old).clamp(-0.2, 0.2)
    return torch.maximum((values - returns) ** 2, (cut - returns) ** 2) / 2


def ppo_targets(flow: Flow, values: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """(whitened advantages, returns) of each half under GAE(1, 0.95)."""
    model = plain_model(flow.model_path)
    with torch.no_grad():
        batches = [plain_batch(model, half, 0.7) for half in flow.halves]
    raw = [gae(b, token_rewards(b), v, 1.0, 0.95) for b, v in zip(batches, values, strict=True)]
    return whitened(raw), [a + v for a, v in zip(raw, values, strict=True)]


# Mutations caught: values of the token's own state instead of the one that predicts it; GAE over whole prompts;
# returns of whitened advantages; old values taken anew each step; policy steps after the critic's with its new
# values; the critic's epochs those of the policy; whitening per mini-batch.
def test_ppo_with_a_critic_of_its_own_is_a_plain_loop_of_two_models(flow: Flow):
    found, metrics = flow.train(SCENARIOS["ppo-critic"], "pieces")
    critic = PlainCritic(flow.model_path)
    with torch.no_grad():
        old = [critic.values(half) for half in flow.halves]
    advantages, returns = ppo_targets(flow, old)
    by_half = iter(advantages)
    expected = plainly_trained(flow, lambda _: next(by_half))
    assert_trained(flow, found, expected)
    for _ in range(3):
        for half, old_values, targets in zip(flow.halves, old, returns, strict=True):
            value_loss(critic.values(half), old_values, targets).mean().backward()
            sgd(critic.parameters(), 0.05)
    torch.testing.assert_close(found["critic.head.weight"], critic.head.weight.detach(), rtol=1e-4, atol=1e-6)
    decoder = {
        name.removeprefix("model."): p.detach()
        for name, p in critic.causal.named_parameters()
        if name.startswith("model.")
    }
    assert_trained(flow, found, decoder, "critic.decoder.")
    assert (critic.head.weight - random_head(32).weight).norm() > 1e-2
    residual, target = torch.cat(returns) - torch.cat(old), torch.cat(returns)
    assert metrics["critic/vf_explained_var"] == pytest.approx(
        float(1 - residual.var() / (target.var() + 1e-5)), rel=1e-3
    )
    assert metrics["critic/values/mean"] == pytest.approx(float(torch.cat(old).mean()), rel=1e-4)
    assert metrics["critic/returns/mean"] == pytest.approx(float(target.mean()), rel=1e-4)


def test_ppo_with_a_shared_body_adds_the_value_loss_to_the_policys(flow: Flow):
    # Mutations caught: no coefficient; the value loss divided by another count; a head that is not stepped.
    found, _ = flow.train(SCENARIOS["ppo-shared"], "pieces")
    critic = PlainCritic(flow.model_path)
    with torch.no_grad():
        old = [critic.values(half) for half in flow.halves]
        before = [plain_batch(critic.causal, half, 0.7) for half in flow.halves]
    advantages, returns = ppo_targets(flow, old)
    for _ in range(2):
        for i, half in enumerate(flow.halves):
            now = plain_batch(critic.causal, half, 0.7)
            loss = default_loss(now, before[i], advantages[i])
            values = critic.head(now.hidden)[:, 0]
            (loss + 0.5 * value_loss(values, old[i], returns[i]).mean()).backward()
            sgd(critic.parameters(), 0.05)
    assert_trained(flow, found, {name: p.detach() for name, p in critic.causal.named_parameters()})
    torch.testing.assert_close(
        found["policy.value_head.weight"], critic.head.weight.detach(), rtol=1e-4, atol=1e-6
    )


def test_values_are_those_of_a_padded_forward_at_the_predicting_states(flow: Flow):
    # Mutation caught: the state of the token itself.
    for name in ("ppo-critic", "ppo-shared"):
        scenario = SCENARIOS[name]
        with flow.learner(scenario) as learner:
            experience = receive_shard(
                shard_for(scenario, flow.groups, HALVES["pieces"]), torch.device("cpu")
            )
            found = stages.fill(experience, learner._models.values)
        with torch.no_grad():
            order = [flow.groups[p] for p in (4, 2, 0, 3, 1)]
            expected = PlainCritic(flow.model_path).values(order)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_only_the_critic_trains_in_its_warm_up(flow: Flow):
    # Mutations caught: `<=`; shards that FSDP left gathered, which cannot be published.
    found, metrics = flow.train(SCENARIOS["ppo-warmup"])
    assert_trained(flow, found, dict(plain_model(flow.model_path).named_parameters()))
    assert "actor/grad_norm" not in metrics
    assert metrics["critic/vf_loss"] > 0
    warmed, metrics = flow.train(SCENARIOS["ppo-warmed"])
    assert metrics["actor/grad_norm"] > 0
    assert torch.equal(found["critic.head.weight"], warmed["critic.head.weight"])


# Mutations caught: only the policy's weights looked at; a critic's tensor named as the policy's of the same place; the
# head on a shared body, which is no tensor of Hugging Face's, left out; the knob of the other optimizer.
@pytest.mark.parametrize(
    ("recipe", "tensor", "knob"),
    [
        ("ppo-critic", "critic.decoder.layers.1.mlp.up_proj.weight", "algorithm.critic.lr"),
        ("ppo-critic", "critic.head.bias", "algorithm.critic.lr"),
        ("ppo-shared", "value_head.weight", "learner.lr"),
        ("ppo-critic", "model.layers.1.mlp.up_proj.weight", "learner.lr"),
    ],
)
def test_a_weight_of_the_critic_that_is_not_finite_is_found_and_named(
    flow: Flow, recipe: str, tensor: str, knob: str
):
    with flow.learner(SCENARIOS[recipe]) as learner:
        learner.check_finite()
        rows = {shard.name: shard.rows for shard in learner.named_shards()}
        rows |= dict(learner._models.critic_shards())
        rows[tensor].view(-1)[-1] = math.inf
        message = rf"weights of {re.escape(tensor)} are not finite; .* lower {re.escape(knob)} "
        with pytest.raises(LearnerError, match=message):
            learner.check_finite()


def reference_logprobs(flow: Flow) -> list[Tensor]:
    model = plain_model(flow.folder / "reference")
    with torch.no_grad():
        return [plain_batch(model, half, 0.7).logprobs for half in flow.halves]


def test_kl_in_the_loss_is_that_to_the_reference_model(flow: Flow):
    # Mutations caught: log-probs of the policy's version 0; reference and learner exchanged; the coefficient in verl's
    # actor/kl_loss.
    found, metrics = flow.train(SCENARIOS["kl_loss"], "pieces")
    assert metrics["actor/kl_loss"] == pytest.approx(metrics["actor/kl"], rel=1e-5)  # a mean over tokens too
    assert metrics["actor/kl"] > 1e-3
    references = {len(r): r for r in reference_logprobs(flow)}

    def loss(now: PlainBatch, before: PlainBatch, advantages: Tensor) -> Tensor:
        d = now.logprobs - references[len(now.logprobs)]
        return (clipped(now, before.logprobs, advantages) * tis(before) + 0.3 * ((-d).exp() - 1 + d)).mean()

    assert_trained(flow, found, plain_training(flow.model_path, flow.halves, loss, num_epochs=2, lr=0.05))


def test_kl_in_the_reward_lowers_the_rewards_to_go(flow: Flow):
    # Mutations caught: the KL at its own token only; a KL of the new policy; added instead of subtracted.
    found, metrics = flow.train(SCENARIOS["kl_reward"], "pieces")
    references = {len(r): r for r in reference_logprobs(flow)}
    means: list[Tensor] = []

    def advantages(batch: PlainBatch) -> Tensor:
        kl = batch.logprobs - references[len(batch.logprobs)]
        outcome, credit = grpo_advantages(batch), torch.zeros_like(kl)
        for row in batch.rows():
            credit[row] = kl[row].flip(0).cumsum(0).flip(0)
            if len(row):
                means.append(kl[row].mean())
        return outcome - 0.2 * credit

    expected = plainly_trained(flow, advantages)
    assert_trained(flow, found, expected)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(float(torch.stack(means).mean()), rel=1e-4)


def test_kl_of_a_trajectory_lowers_its_reward_before_the_group_is_compared(flow: Flow):
    # Mutations caught: subtracted after the division by the deviation, as `to_go` does; the mean of a trajectory in
    # place of its sum; one rank's trajectories alone (kl_reward-trajectory-batch in
    # test_flow.py).
    found, _ = flow.train(SCENARIOS["kl_reward-trajectory"], "pieces")
    references = {len(r): r for r in reference_logprobs(flow)}

    def advantages(batch: PlainBatch) -> Tensor:
        kl = batch.logprobs - references[len(batch.logprobs)]
        rewards = [
            None if reward is None else reward - 0.2 * float(kl[row].sum())
            for row, reward in zip(batch.rows(), batch.rewards, strict=True)
        ]
        return grpo_advantages(replace(batch, rewards=rewards))

    expected = plain_training(
        flow.model_path,
        flow.halves,
        lambda now, before, a: (clipped(now, before.logprobs, a) * tis(before)).mean(),
        advantages=advantages,
        num_epochs=2,
        lr=0.05,
    )
    assert_trained(flow, found, expected)


def test_rewards_are_cut_before_advantages_of_the_outcome_too(flow: Flow):
    # Mutation caught: the cut of PPO alone.
    found, _ = flow.train(SCENARIOS["kl_reward-whiten"], "pieces")
    raw = []
    for batch, reference in zip(flow.at_start(), reference_logprobs(flow), strict=True):
        rewards = token_rewards(batch, batch.logprobs - reference, 0.2, clip=0.8)
        raw.append(torch.zeros_like(rewards))
        for row in batch.rows():
            raw[-1][row] = rewards[row].flip(0).cumsum(0).flip(0)
    by_half = iter(whitened(raw))
    expected = plainly_trained(flow, lambda _: next(by_half))
    assert_trained(flow, found, expected)


def test_kl_in_the_reward_of_ppo_is_part_of_each_tokens_reward(flow: Flow):
    # Mutation caught: the clip of the reward after the KL.
    found, _ = flow.train(SCENARIOS["ppo-kl"], "pieces")
    critic, references = PlainCritic(flow.model_path), iter(reference_logprobs(flow))
    with torch.no_grad():
        values = [critic.values(half) for half in flow.halves]
        batches = [plain_batch(critic.causal, half, 0.7) for half in flow.halves]
    raw = [
        gae(b, token_rewards(b, b.logprobs - next(references), 0.2, clip=0.8), v, 1.0, 0.95)
        for b, v in zip(batches, values, strict=True)
    ]
    by_half = iter(whitened(raw))
    expected = plainly_trained(flow, lambda _: next(by_half))
    assert_trained(flow, found, expected)


def test_the_adaptive_coefficient_follows_the_kl_over_versions_and_a_fresh_reference_has_none(flow: Flow):
    # Mutations caught: the coefficient changed before its batch; trajectories without tokens counted; the reference
    # refreshed after every version, or before the steps.
    kl_reward = {"coef": 0.2, "type": "adaptive", "target": 0.01, "horizon": 100.0}
    scenario = Scenario({"kl_reward": kl_reward, "reference": {"model": None, "refresh_every": 2}})
    coefficients, penalties = [], []
    with flow.learner(scenario) as learner:
        for index in range(4):
            shard = shard_for(scenario, flow.groups, HALVES["whole"])
            shard.plan = msgspec.structs.replace(shard.plan, index=index)
            metrics = learner.update(shard)
            coefficients.append(metrics["actor/reward_kl_penalty_coeff"])
            penalties.append(metrics["actor/reward_kl_penalty"])
    assert penalties[0] == penalties[2] == 0.0  # the reference is the policy: exactly
    assert min(abs(penalties[1]), abs(penalties[3])) > 1e-2
    expected = [0.2]
    for penalty in penalties[:-1]:
        error = min(max(penalty / 0.01 - 1, -0.2), 0.2)
        expected.append(expected[-1] * (1 + error * 12 / 100.0))
    assert coefficients == pytest.approx(expected)


def test_one_token_has_no_variance_to_explain_and_no_nan_to_report():
    # Mutation: divide by n - 1 all the same -> NaN in metrics.jsonl, which is no JSON.
    columns = SimpleNamespace(values=torch.tensor([0.25]), returns=torch.tensor([1.0]))
    found = value_metrics(
        cast("Any", SimpleNamespace(columns=columns)),
        cast("Any", SimpleNamespace(all_reduce=lambda sums: sums)),
    )
    assert found == {"critic/returns/mean": 1.0, "critic/values/mean": 0.25}
