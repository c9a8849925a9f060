"""One lease to one group, with an engine that remembers its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from asyncrl.envs.env import Answer, RewardOutcome, SingleTurnEnv
from asyncrl.rollout_server.engine import Completion, GenerationRequest
from asyncrl.rollout_server.group_runner import run_group
from asyncrl.stream.messages import Lease
from asyncrl.types import SamplingSpec, Status, TrajectoryGroup


class Engine:
    """Answers a request with its seed."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        return Completion(
            np.array([request.seed], np.int32),
            np.array([-0.5], np.float32),
            np.array([3], np.int32),
            "stop",
            0,
        )


class Seeds:
    """Rewards: the answer itself."""

    needs_group = False
    num_finished = 0

    async def score_one(self, answer: Answer, row: dict[str, Any]) -> RewardOutcome:
        return RewardOutcome(float(answer.text), Status.SCORED)

    async def score_group(self, answers: Sequence[Answer], row: dict[str, Any]) -> list[RewardOutcome]:
        raise AssertionError("no reward needs the group")


class Ranks(Seeds):
    """Rewards: how many answers of the call are smaller."""

    needs_group = True

    async def score_one(self, answer: Answer, row: dict[str, Any]) -> RewardOutcome:
        return RewardOutcome(None, Status.SCORED)

    async def score_group(self, answers: Sequence[Answer], row: dict[str, Any]) -> list[RewardOutcome]:
        seeds = [int(answer.text) for answer in answers]
        return [RewardOutcome(float(sum(s < own for s in seeds)), Status.SCORED) for own in seeds]


class Text:
    def decode(self, token_ids: Any, skip_special_tokens: bool = True, **kwargs: Any) -> str:
        return str(token_ids[0])


def group_of(lease: Lease, rewards: Seeds | None = None) -> tuple[TrajectoryGroup, list[GenerationRequest]]:
    engine: Any = Engine()
    group = asyncio.run(
        run_group(
            lease,
            np.array([5, 6], np.int32),
            env=SingleTurnEnv(Text()),
            engine=engine,
            rewards=rewards or Seeds(),
            sampling=SamplingSpec(0.7, 16, stop=("x",)),
        )
    )
    return group, sorted(engine.requests, key=lambda request: request.request_id)


# Mutations caught: the first requests greedy; all of them; a temperature that stays for the next group; greedy
# trajectories that are not the last, where the coordinator and the ranks look for them.
@pytest.mark.parametrize("num_greedy", [0, 1, 2])
def test_the_last_requests_of_a_lease_are_greedy_and_nothing_else_changes(num_greedy: int):
    group, requests = group_of(Lease(7, 0, [11, 12, 13], {}, num_greedy))
    assert [request.sampling.temperature for request in requests] == [0.7] * (3 - num_greedy) + [
        0.0
    ] * num_greedy
    assert [request.seed for request in requests] == [11, 12, 13]
    assert {request.sampling.max_completion_tokens for request in requests} == {16}
    assert {request.sampling.stop for request in requests} == {("x",)}
    assert [t.reward for t in group.trajectories] == [11.0, 12.0, 13.0]
    assert group.ordinal == 7


def test_a_reward_that_compares_a_groups_answers_does_not_see_the_greedy_one():
    # Mutation caught: one call for all, in which the greedy answer, the smallest, adds 1 to every other's rank.
    group, _ = group_of(Lease(7, 0, [12, 13, 14, 11], {}, 1), Ranks())
    assert [t.reward for t in group.trajectories] == [0.0, 1.0, 2.0, 0.0]
    assert [t.status for t in group.trajectories] == [Status.SCORED] * 4
