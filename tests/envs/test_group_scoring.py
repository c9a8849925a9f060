"""When rewards are called for a group whose rollouts end at different times."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from reward_cases import answer

from asyncrl.envs.env import Answer, RewardOutcome
from asyncrl.envs.group_scoring import GroupScoring, add_outcomes
from asyncrl.types import Status

ROW = {"answer": "a"}


def scored(value: float | None, **components: float) -> RewardOutcome:
    return RewardOutcome(value, Status.SCORED, components=components)


class Recorder:
    """Rewards that write down what they are given: a text's length, and its rank in the group."""

    def __init__(self, needs_group: bool) -> None:
        self.needs_group = needs_group
        self.num_finished = 0
        self.calls: list[Any] = []

    async def score_one(self, answer: Answer, row: dict[str, Any]) -> RewardOutcome:
        assert row is ROW
        self.calls.append(answer.text)
        return scored(float(len(answer.text)), length=float(len(answer.text)))

    async def score_group(self, answers: Sequence[Answer], row: dict[str, Any]) -> list[RewardOutcome]:
        self.calls.append([answer.text for answer in answers])
        await asyncio.sleep(0)
        return [scored(10.0 * index, rank=10.0 * index) for index, _ in enumerate(answers)]


def run(rewards: Any, ends: Sequence[tuple[str, float] | None]) -> list[RewardOutcome | None]:
    """Rollouts that answer (text, after so many turns of the loop), or end without an answer (None)."""
    scoring = GroupScoring(rewards, ROW, len(ends), timed=nullcontext)

    async def rollout(end: tuple[str, float] | None) -> RewardOutcome | None:
        with scoring.rollout() as score:
            if end is None:
                return None
            for _ in range(int(end[1])):
                await asyncio.sleep(0)
            return await score(answer(end[0]))

    async def main() -> list[RewardOutcome | None]:
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            rollouts = [tasks.create_task(rollout(end)) for end in ends]
        return [task.result() for task in rollouts]

    return asyncio.run(main())


def test_an_answer_is_scored_as_soon_as_it_is_there() -> None:
    rewards = Recorder(needs_group=False)
    outcomes = run(rewards, [("slow", 20), ("b", 0), ("cc", 5)])
    # Catches: scoring once the group is complete (the order of the list).
    assert rewards.calls == ["b", "cc", "slow"]
    assert [outcome and outcome.reward for outcome in outcomes] == [4.0, 1.0, 2.0]


def test_a_list_reward_is_called_once_when_all_answers_are_there() -> None:
    rewards = Recorder(needs_group=True)
    outcomes = run(rewards, [("slow", 20), ("b", 0), ("cc", 5)])
    assert rewards.calls == ["b", "cc", "slow", ["b", "cc", "slow"]]
    # Each rollout gets its own value back, though the call has them in another order.
    assert [outcome and outcome.reward for outcome in outcomes] == [24.0, 1.0, 12.0]
    assert outcomes[2] is not None
    assert outcomes[2].components == {"length": 2.0, "rank": 10.0}


@pytest.mark.parametrize("ends", [[None, ("b", 5), None], [("b", 0), None, None]])
def test_a_rollout_without_an_answer_holds_up_nobody(ends: list[tuple[str, float] | None]) -> None:
    # Catches: waiting for an aborted rollout for ever.
    rewards = Recorder(needs_group=True)
    outcomes = run(rewards, ends)
    assert rewards.calls == ["b", ["b"]]
    assert [outcome and outcome.reward for outcome in outcomes] == [1.0 if end else None for end in ends]


def test_a_completion_that_no_reward_applies_to_has_no_reward() -> None:
    class Nothing(Recorder):
        async def score_one(self, answer: Answer, row: dict[str, Any]) -> RewardOutcome:
            return scored(None)

    (outcome,) = run(Nothing(needs_group=False), [("a", 0)])
    assert outcome is not None
    # Catches: the empty sum, 0, which would teach something.
    assert (outcome.reward, outcome.status) == (None, Status.REWARD_FAILED)
    assert outcome.detail.startswith("no reward applies to this completion")


def test_sums_leave_out_what_does_not_apply_and_keep_failures() -> None:
    failed = RewardOutcome(None, Status.REWARD_TIMEOUT, "too long")
    assert add_outcomes(scored(1.0, a=1.0), scored(None), scored(-0.5, b=-1.0)) == scored(0.5, a=1.0, b=-1.0)
    assert add_outcomes(scored(None), scored(None)) == scored(None)
    # Catches: half a sum as the reward.
    assert add_outcomes(scored(1.0), failed, scored(2.0)) == failed
    too_large = add_outcomes(scored(9e29), scored(9e29))
    assert (too_large.reward, too_large.status) == (None, Status.REWARD_FAILED)
