"""One group's rewards: one answer at a time as rollouts finish, and those that compare a group once all have.

scoring = GroupScoring(rewards, row, num_rollouts=8, timed=contextlib.nullcontext)
with scoring.rollout() as score:       # once a rollout, all at the same time
    outcome = await score(answer)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from asyncrl.envs.env import Answer, RewardOutcome, Rewards, Score
from asyncrl.types import MAX_ABS_REWARD, Status


class GroupScoring:
    """Scores `num_rollouts` rollouts of one row. `timed()` is entered around every call of a reward."""

    def __init__(
        self,
        rewards: Rewards,
        row: dict[str, Any],
        num_rollouts: int,
        timed: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._rewards = rewards
        self._row = row
        self._timed = timed
        self._num_running = num_rollouts
        self._answers: list[Answer] = []
        self._all_there = asyncio.Event()
        self._turn = asyncio.Lock()
        self._of_group: list[RewardOutcome] | None = None

    @contextmanager
    def rollout(self) -> Iterator[Score]:
        """The `score` of one rollout. One that ends without an answer no longer holds up the others."""
        answered = False

        async def score(answer: Answer) -> RewardOutcome:
            nonlocal answered
            assert not answered, "a rollout has one answer"
            answered = True
            return await self._score(answer)

        try:
            yield score
        finally:
            if not answered:
                self._count_out()

    async def _score(self, answer: Answer) -> RewardOutcome:
        position = len(self._answers)
        self._answers.append(answer)
        self._count_out()
        with self._timed():
            outcome = await self._rewards.score_one(answer, self._row)
        if self._rewards.needs_group:
            await self._all_there.wait()
            outcome = add_outcomes(outcome, (await self._score_group())[position])
        if outcome.status is Status.SCORED and outcome.reward is None:
            detail = "no reward applies to this completion: each is for other rows, or returned None"
            return RewardOutcome(None, Status.REWARD_FAILED, detail)
        return outcome

    async def _score_group(self) -> list[RewardOutcome]:
        """One call for all: the first to come makes it, the others wait their turn and find it made."""
        async with self._turn:
            if self._of_group is None:
                with self._timed():
                    self._of_group = await self._rewards.score_group(self._answers, self._row)
        return self._of_group

    def _count_out(self) -> None:
        self._num_running -= 1
        if not self._num_running:
            self._all_there.set()


def add_outcomes(*outcomes: RewardOutcome) -> RewardOutcome:
    """The sum of the rewards that apply. A failure among them is the outcome: half a sum is no reward."""
    for outcome in outcomes:
        if outcome.status is not Status.SCORED:
            return outcome
    applying = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    total = sum(applying) if applying else None
    if total is not None and not abs(total) <= MAX_ABS_REWARD:
        detail = f"the rewards add up to {total}, more than {MAX_ABS_REWARD:g} in size"
        return RewardOutcome(None, Status.REWARD_FAILED, detail)
    components = {label: value for outcome in outcomes for label, value in outcome.components.items()}
    return RewardOutcome(total, Status.SCORED, components=components)
