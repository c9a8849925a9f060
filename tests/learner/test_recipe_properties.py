"""What must not matter to a recipe, and what must agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from flow_cases import (
    HALVES,
    SCENARIOS,
    groups_of,
    shard_for,
)
from recipe_cases import Flow, assert_trained

from asyncrl.algorithms.losses import Counts
from asyncrl.learner import stages
from asyncrl.learner.experience import receive_shard
from asyncrl.learner.steps import counts_of
from asyncrl.types import Plan, Shard


@pytest.fixture
def flow(tmp_path: Path) -> Flow:
    return Flow.at(tmp_path)


@pytest.mark.parametrize("name", ["recipe-grpo", "ppo", "reinforce", "ppo-critic", "target_kl"])
def test_a_first_mini_batch_that_is_scored_as_it_trains_is_scored_as_ahead(
    flow: Flow, name: str, monkeypatch: pytest.MonkeyPatch
):
    # Mutation caught: log-probs of the first step's microbatches after the step, or never.
    late, late_metrics = flow.train(SCENARIOS[name], "pieces")
    monkeypatch.setattr(stages, "is_read_early", lambda config: True)
    ahead, ahead_metrics = flow.train(SCENARIOS[name], "pieces")
    assert all(torch.equal(late[tensor], ahead[tensor]) for tensor in late)
    without_times = {name: v for name, v in late_metrics.items() if not name.startswith("timing_s/")}
    assert without_times == {name: ahead_metrics[name] for name in without_times}


@pytest.mark.parametrize("name", ["recipe-grpo", "ppo-kl", "m2po", "kl_cov", "otb-all", "gdpo", "log_linear"])
def test_nothing_behind_a_mask_matters_be_it_nan(flow: Flow, name: str):
    # Mutation caught: a mask that multiplies, anywhere.
    def poison(shard: Shard) -> None:
        for group in shard.groups:
            for t in group.trajectories:
                masked = t.loss_mask == 0
                t.rollout_logprobs[masked] = np.where(np.arange(masked.sum()) % 2, np.inf, np.nan)
                t.policy_versions[masked] = -1

    clean, _ = flow.train(SCENARIOS[name], "pieces")
    poisoned, _ = flow.train(SCENARIOS[name], "pieces", poison)
    assert all(torch.equal(clean[tensor], poisoned[tensor]) for tensor in clean)


@pytest.mark.parametrize("name", ["recipe-grpo", "ppo-shared", "kept-prompt-mean", "clip_cov", "m2po", "otb"])
def test_the_order_of_groups_in_a_microbatch_does_not_matter(flow: Flow, name: str):
    # Mutation caught: columns taken in the plan's order of groups instead of the shard's.
    forward, _ = flow.train(SCENARIOS[name], "whole")
    backward, _ = flow.train(SCENARIOS[name], "backward")
    prefix = "policy.transformer."
    assert_trained(
        flow, backward, {n.removeprefix(prefix): w for n, w in forward.items() if n.startswith(prefix)}
    )


def test_the_plans_counts_are_those_of_the_columns(flow: Flow):
    # Mutations caught: trajectories without a token left out of the plan's count; failed rollouts in it.
    num_failed = 0
    for scenario in (SCENARIOS["recipe-grpo"], SCENARIOS["remax"]):
        groups = groups_of(scenario, flow.model_path)
        shard = shard_for(scenario, groups, HALVES["pieces"])
        experience = receive_shard(shard, torch.device("cpu"))
        for number, minibatch in enumerate(experience.minibatches):
            found = Counts(0.0, 0.0, 0.0, 0.0)
            for microbatch in minibatch:
                index = experience.group_index[microbatch.trajectories]
                found = found + Counts.of(experience.segments_of(microbatch), index)
            num_greedy = scenario.num_greedy * sum(len(m.groups) for m in minibatch)
            trajectories = [t for m in minibatch for group in m.groups for t in group.trajectories]
            failed = sum(t.reward is None for t in trajectories)
            num_failed += failed
            expected = counts_of(shard.plan, number)
            assert found.trajectories - num_greedy - failed == expected.trajectories
            assert (found.tokens, found.trained_trajectories, found.groups) == (
                expected.tokens,
                expected.trained_trajectories,
                expected.groups,
            )
    assert num_failed > 0


def test_a_trajectory_that_age_left_no_token_is_in_no_denominator():
    # Mutations caught: the aged-out of another mini-batch; taken from the trained trajectories, where they are not.
    plan = Plan(
        index=9,
        ordinals=[0, 1],
        rewards=[[1.0, 0.0, None], [0.5, 0.5, 1.0]],
        num_trained_tokens=[[4, 0, 0], [0, 0, 3]],
        minibatches=[[[[0]]], [[[1]]]],
        num_epochs=1,
        num_aged_out=[0, 1],
    )
    assert [counts_of(plan, number).trajectories for number in (0, 1)] == [2.0, 2.0]
    assert [counts_of(plan, number).trained_trajectories for number in (0, 1)] == [1.0, 1.0]
