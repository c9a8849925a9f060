"""Advantages that read more than a reward each, against plain loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from flow_cases import (
    LABELS,
    SCENARIOS,
    with_greedy,
)
from plain_loop import (
    AGGREGATED,
    PlainBatch,
    clipped,
    plain_training,
)
from recipe_cases import Flow, assert_trained, kept_by_k3, plainly_trained, tis, whitened
from torch import Tensor

from asyncrl.errors import LearnerError


@pytest.fixture
def flow(tmp_path: Path) -> Flow:
    return Flow.at(tmp_path)


def test_remax_compares_with_the_greedy_reward_and_does_not_count_it_as_a_trajectory(flow: Flow):
    # Mutations caught: the greedy trajectory in the denominator, or trained; the first instead of the last.
    with_greedy(flow.groups)

    def advantages(batch: PlainBatch) -> Tensor:
        greedy = {int(g): batch.rewards[i] for i, g in enumerate(batch.group)}  # the last of each wins
        return torch.tensor(
            [batch.rewards[r] - greedy[int(batch.group[r])] for r in batch.trajectory.tolist()]
        )

    for name, mode in (
        ("remax", "token-mean"),
        ("remax-sequences", "seq-mean-token-mean"),
        ("remax-kept", "seq-mean-token-sum"),
    ):
        found, _ = flow.train(SCENARIOS[name], "pieces")

        def loss(now: PlainBatch, before: PlainBatch, a: Tensor, mode: str = mode) -> Tensor:
            of_tokens = clipped(now, before.logprobs, a) * tis(before)
            if mode == "seq-mean-token-sum":
                of_tokens = of_tokens * kept_by_k3(before)
            share = AGGREGATED[mode](now, of_tokens)
            sampled = now.num_trajectories - int(now.group.max()) - 1
            return share if mode == "token-mean" else share * now.num_scored / sampled

        expected = plain_training(
            flow.model_path, flow.halves, loss, advantages=advantages, num_epochs=2, lr=0.05
        )
        assert_trained(flow, found, expected)


def test_gdpo_scales_each_reward_alone_and_whitens_the_weighted_sum(flow: Flow):
    # Mutations caught: the sum scaled instead; a reward that does not apply as 0; whitened within a mini-batch.
    found, _ = flow.train(SCENARIOS["gdpo"], "pieces")
    raw = []
    for half in flow.halves:
        of_half = []
        for group in half:
            total = np.zeros(len(group.trajectories))
            for label, weight in zip(LABELS, (1.0, -0.5), strict=True):
                values = np.array([t.reward_components.get(label, np.nan) for t in group.trajectories])
                centred = (values - np.nanmean(values)) / (np.nanstd(values, ddof=1) + 1e-6)
                total += weight * np.nan_to_num(centred)
            of_half += [
                a for t, a in zip(group.trajectories, total, strict=True) for _ in range(t.loss_mask.sum())
            ]
        raw.append(torch.tensor(of_half))
    by_half = iter(whitened(raw))
    expected = plainly_trained(flow, lambda _: next(by_half))
    assert_trained(flow, found, expected)


def test_otb_takes_the_baseline_of_the_group_at_the_same_step(flow: Flow):
    # Mutations caught: positions that count untrained tokens; other groups' paths.
    found, _ = flow.train(SCENARIOS["otb"], "pieces")

    def advantages(batch: PlainBatch) -> Tensor:
        moved = 1 - 2 * batch.logprobs.exp() + batch.sum_pi_squared
        result = torch.zeros_like(moved)
        rows = batch.rows()
        for group in range(int(batch.group.max()) + 1):
            own = [r for r in range(len(rows)) if batch.group[r] == group and len(rows[r])]
            for r in own:
                for step in range(len(rows[r])):
                    reach = [o for o in own if len(rows[o]) > step]
                    weight = {o: float(moved[rows[o][: step + 1]].sum()) for o in reach}
                    total = sum(weight.values()) + 1e-8
                    baseline = sum(weight[o] * batch.rewards[o] for o in reach) / total
                    result[rows[r][step]] = batch.rewards[r] - (baseline if len(own) > 1 else 0.0)
        return result

    expected = plainly_trained(flow, advantages)
    assert_trained(flow, found, expected)


def test_maxrl_refuses_rewards_whose_mean_could_turn_the_sign_of_an_advantage(flow: Flow):
    # Mutation: divide all the same -> of rewards -1, -1, -1, 1 the best answer gets -3.
    with pytest.raises(LearnerError, match=r"scale mean .* a reward of -1 .*rescale"):
        flow.train(SCENARIOS["maxrl"], "pieces")
