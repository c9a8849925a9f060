"""What the reward tests share: requests, answers, and a pool that must leave no process behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import psutil

from asyncrl.config import Config, load_config
from asyncrl.envs.env import Answer
from asyncrl.envs.reward_messages import RewardRequest, RewardSpec
from asyncrl.envs.reward_pool import RewardPool
from asyncrl.envs.weighted_rewards import WeightedRewards


def request(*completions: str, row: dict[str, Any] | None = None, **fields: Any) -> RewardRequest:
    """A call for these completions; their token ids are 0, 1, ... as many as characters."""
    ids = [list(range(len(text))) for text in completions]
    return RewardRequest(list(completions), ids, row or {}, **fields)


def answer(text: str) -> Answer:
    return Answer(text, np.arange(len(text), dtype=np.int32))


def in_pool(spec: RewardSpec, check: Callable[[RewardPool], Awaitable[Any]], num_workers: int = 1) -> None:
    """Runs `check` in a pool, and holds that no child process outlives it."""

    async def main() -> None:
        async with asyncio.timeout(300), RewardPool(spec, num_workers) as pool:
            await check(pool)

    _leaves_no_process(main())


def in_rewards(config: Config, check: Callable[[WeightedRewards], Awaitable[Any]]) -> None:
    """As `in_pool`, with all rewards of a config."""

    async def main() -> None:
        async with asyncio.timeout(300), WeightedRewards(config, num_workers=1) as rewards:
            await check(rewards)

    _leaves_no_process(main())


def rewards_config(*rewards: dict[str, Any], **keys: Any) -> Config:
    """The default configuration with these rewards."""
    return load_config(None, [f"{key}={value}" for key, value in keys.items()]).model_copy(
        update={"reward": load_rewards(rewards)}
    )


def load_rewards(rewards: Any) -> Any:
    return Config.model_validate({"reward": [dict(reward) for reward in rewards]}, strict=False).reward


def _leaves_no_process(coroutine: Any) -> None:
    before = set(psutil.Process().children(recursive=True))
    asyncio.run(coroutine)
    assert set(psutil.Process().children(recursive=True)) - before == set()
