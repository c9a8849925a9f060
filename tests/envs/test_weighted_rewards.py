"""Several rewards of one run, each in its worker processes, added up."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path

import pytest
from reward_cases import answer, in_rewards, rewards_config

from asyncrl.envs.env import RewardOutcome
from asyncrl.envs.group_scoring import GroupScoring
from asyncrl.envs.weighted_rewards import WeightedRewards
from asyncrl.errors import ConfigError
from asyncrl.types import Status

REWARDS = """
def length(completion, row):
    return None if completion == "skip" else len(completion)

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raise":
        raise ValueError("no idea")
    return {"score": float(solution_str == ground_truth), "acc": 1.0, "why": solution_str}

async def rank(completions, answer, **columns):
    assert answer == [answer[0]] * len(completions)
    return [None if text == "skip" else float(sorted(completions).index(text)) for text in completions]
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "three_rewards.py"
    path.write_text(REWARDS)
    return str(path)


def test_weights_sources_lists_and_components(file: str) -> None:
    config = rewards_config(
        {"name": f"{file}:length", "weight": 0.1},
        {"name": file, "weight": 2.0, "data_source": ("gsm8k",)},
        {"name": f"{file}:rank", "weight": -1.0},
    )
    gsm8k, other = {"answer": "72", "data_source": "gsm8k"}, {"answer": "72", "data_source": "math"}

    async def check(rewards: WeightedRewards) -> None:
        assert rewards.needs_group
        # Components are named by function, and are what it gave: the weight is not in them.
        assert await rewards.score_one(answer("72"), gsm8k) == RewardOutcome(
            0.1 * 2 + 2.0 * 1.0,
            Status.SCORED,
            components={"length": 2.0, "three_rewards": 1.0, "three_rewards/acc": 1.0},
        )
        assert (await rewards.score_one(answer("72"), other)).components == {"length": 2.0}
        # None skips one reward, and the rest is the sum.
        assert (await rewards.score_one(answer("skip"), gsm8k)).components == {
            "three_rewards": 0.0,
            "three_rewards/acc": 1.0,
        }
        nothing = RewardOutcome(None, Status.SCORED)
        assert await rewards.score_one(answer("skip"), other) == nothing
        failed = await rewards.score_one(answer("raise"), gsm8k)
        assert failed == RewardOutcome(
            None, Status.REWARD_FAILED, "reward three_rewards: ValueError: no idea (three_rewards.py, line 7)"
        )
        group = await rewards.score_group([answer("b"), answer("skip"), answer("a")], other)
        assert group == [
            RewardOutcome(-1.0, Status.SCORED, components={"rank": 1.0}),
            nothing,
            RewardOutcome(-0.0, Status.SCORED, components={"rank": 0.0}),
        ]

    in_rewards(config, check)


def test_one_reward_of_eight_that_never_ends_costs_its_own_rollout_alone(tmp_path: Path) -> None:
    # Mutation: the worker is not replaced, or the group ends with its first failure -> fewer than 7 scores.
    file = tmp_path / "hanging.py"
    file.write_text(
        "import time\n"
        "def f(completion, row):\n    return time.sleep(600) if completion == '3' else float(completion)\n"
    )
    config = rewards_config({"name": f"{file}:f"}, **{"timeouts.reward_s": 2.0})

    async def check(rewards: WeightedRewards) -> None:
        scoring = GroupScoring(rewards, {}, 8, timed=nullcontext)

        async def rollout(sample: int) -> RewardOutcome:
            with scoring.rollout() as score:
                return await score(answer(str(sample)))

        outcomes = await asyncio.gather(*(rollout(sample) for sample in range(8)))
        assert [outcome.reward for outcome in outcomes] == [0.0, 1.0, 2.0, None, 4.0, 5.0, 6.0, 7.0]
        assert outcomes[3].status is Status.REWARD_TIMEOUT

    in_rewards(config, check)


def test_rewards_of_one_kind_need_no_group_and_give_nothing_to_it() -> None:
    async def check(rewards: WeightedRewards) -> None:
        assert not rewards.needs_group
        assert await rewards.score_group([answer("a")], {"answer": "a"}) == [
            RewardOutcome(None, Status.SCORED)
        ]

    in_rewards(rewards_config({"name": "exact_match"}), check)


def test_one_reward_that_cannot_start_ends_the_others(file: str) -> None:
    async def check(rewards: WeightedRewards) -> None:
        raise AssertionError("it started")

    with pytest.raises(ConfigError, match=r"has no 'lenght' \(did you mean 'length'\?\)"):
        in_rewards(rewards_config({"name": f"{file}:length"}, {"name": f"{file}:lenght"}), check)
