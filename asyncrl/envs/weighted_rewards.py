"""All rewards of a run, added up: what a rollout server scores with (the Rewards seam of env.py).

    reward of a completion = sum of weight x value over the rewards that apply to it

A reward applies to the rows whose data source it names (to all, where it names none) unless it returns None.
One that fails leaves the completion without a reward: half a sum is not a smaller reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from asyncrl.config import Config, RewardConfig
from asyncrl.envs.env import Answer, RewardOutcome
from asyncrl.envs.group_scoring import add_outcomes
from asyncrl.envs.reward_messages import RewardRequest, RewardSpec
from asyncrl.envs.reward_pool import RewardPool
from asyncrl.envs.rewards import reward_labels
from asyncrl.envs.rows import answer_of, source_of
from asyncrl.types import Status

NOTHING_APPLIES = RewardOutcome(None, Status.SCORED)


@dataclass(frozen=True, slots=True)
class _Weighted:
    label: str
    config: RewardConfig
    pool: RewardPool


class WeightedRewards:
    """One pool a reward; `num_workers` processes at most in each."""

    def __init__(self, config: Config, num_workers: int) -> None:
        self._data = config.data
        labels = reward_labels([reward.name for reward in config.reward])
        self._rewards = [
            _Weighted(label, reward, RewardPool(reward_spec(reward, config.timeouts.reward_s), num_workers))
            for label, reward in zip(labels, config.reward, strict=True)
        ]
        self._stack = AsyncExitStack()
        self._num_finished = 0

    async def __aenter__(self) -> WeightedRewards:
        """Starts a worker of each. Raises ConfigError when a reward cannot be imported or loaded."""
        async with AsyncExitStack() as stack:
            for reward in self._rewards:
                await stack.enter_async_context(reward.pool)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def needs_group(self) -> bool:
        return any(reward.pool.takes_group for reward in self._rewards)

    @property
    def num_finished(self) -> int:
        return self._num_finished

    async def score_one(self, answer: Answer, row: dict[str, Any]) -> RewardOutcome:
        return (await self._score([answer], row, takes_group=False))[0]

    async def score_group(self, answers: Sequence[Answer], row: dict[str, Any]) -> list[RewardOutcome]:
        return await self._score(answers, row, takes_group=True)

    async def _score(
        self, answers: Sequence[Answer], row: dict[str, Any], *, takes_group: bool
    ) -> list[RewardOutcome]:
        """One outcome an answer: the sum over the rewards of this kind, all of them run at once."""
        request = self._request(answers, row)
        applying = [
            reward
            for reward in self._rewards
            if reward.pool.takes_group is takes_group and applies(reward.config, request.data_source)
        ]
        async with asyncio.TaskGroup() as calls:
            tasks = [calls.create_task(reward.pool.score(request)) for reward in applying]
        self._num_finished += len(tasks)
        by_reward = [
            [_weighted(outcome, reward) for outcome in task.result()]
            for reward, task in zip(applying, tasks, strict=True)
        ]
        return [add_outcomes(NOTHING_APPLIES, *of_answer) for of_answer in zip(*by_reward, strict=True)] or [
            NOTHING_APPLIES
        ] * len(answers)

    def _request(self, answers: Sequence[Answer], row: dict[str, Any]) -> RewardRequest:
        return RewardRequest(
            completions=[answer.text for answer in answers],
            completion_ids=[answer.token_ids.tolist() for answer in answers],
            row=row,
            prompt=row.get(self._data.prompt_key),
            answer=answer_of(row, self._data),
            data_source=source_of(row, self._data),
        )


def reward_spec(reward: RewardConfig, timeout_s: float) -> RewardSpec:
    """What a worker of this reward is told."""
    return RewardSpec(reward.name, reward.style, reward.kwargs, timeout_s)


def applies(reward: RewardConfig, data_source: str) -> bool:
    """Whether the reward is for rows of that source."""
    return not reward.data_source or data_source in reward.data_source


def _weighted(outcome: RewardOutcome, reward: _Weighted) -> RewardOutcome:
    """One reward's outcome as a term of the sum; its label says whose numbers or whose failure it is."""
    if outcome.status is not Status.SCORED:
        return RewardOutcome(None, outcome.status, f"reward {reward.label}: {outcome.detail}")
    if outcome.reward is None:
        return NOTHING_APPLIES
    components = {reward.label: outcome.reward}
    components |= {f"{reward.label}/{key}": value for key, value in outcome.components.items()}
    return RewardOutcome(reward.config.weight * outcome.reward, Status.SCORED, components=components)
