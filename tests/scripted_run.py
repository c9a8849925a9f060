"""A run's coordinator over real sockets, for the scripted peers of scripted_peers.py: no process, no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from memory_dataset import dataset_of

from asyncrl.config import Config, load_config
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.mailbox import Mailbox
from asyncrl.launch.resume import evaluated_versions, find_resumption, open_run_directory
from asyncrl.stream.codec import Limits
from asyncrl.stream.connections import Connection
from asyncrl.stream.envelope import Envelope
from asyncrl.stream.sizes import max_eval_completion_tokens
from asyncrl.stream.sockets import Listener

VOCAB_SIZE = 50
NUM_ROWS = 10
NUM_EVAL_ROWS = 6
DEADLINE_S = 30.0
"""Of one scenario."""
MAX_MESSAGE_BYTES = 1 << 20


def make_config(tmp_path: Path, *overrides: str) -> Config:
    """Batches of 2 groups of 2; a server is lost after 1.5 s of silence."""
    return load_config(
        None,
        [
            f"run.dir={tmp_path}",
            "run.name=test",
            "rollout.group_size=2",
            "learner.prompts_per_batch=2",
            "learner.max_versions=3",
            "timeouts.heartbeat_s=1.5",
            *overrides,
        ],
    )


def limits_of(config: Config, newest_version: int = 0) -> Limits:
    """What both ends hold messages to."""
    return Limits(
        vocab_size=VOCAB_SIZE,
        group_size=config.rollouts_per_group,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_completion_tokens=config.rollout.max_completion_tokens,
        newest_version=newest_version,
        eval_num_samples=config.eval.num_samples,
        eval_max_completion_tokens=max_eval_completion_tokens(config),
    )


def listener() -> Listener:
    return Listener("127.0.0.1", 0, max_message_bytes=MAX_MESSAGE_BYTES, heartbeat_s=5.0)


def connection(address: str, name: str, limits: Limits) -> Connection:
    envelope = Envelope(name, max_message_bytes=MAX_MESSAGE_BYTES)
    return Connection(address, envelope, limits, heartbeat_s=5.0, connect_s=5.0)


@dataclass
class Run:
    """A running coordinator, and what its scripted peers saw."""

    config: Config
    coordinator: Coordinator
    address: str
    task: asyncio.Task[None]
    path: Path
    log: list[tuple[Any, ...]] = field(default_factory=list)
    logged: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def note(self, *entry: Any) -> None:
        self.log.append(entry)
        async with self.logged:
            self.logged.notify_all()

    async def until(self, *entry: Any) -> None:
        """Waits until some peer has noted it."""
        async with self.logged:
            await self.logged.wait_for(lambda: entry in self.log)

    def position(self, *entry: Any) -> int:
        return self.log.index(entry)

    def connect(self, name: str) -> Connection:
        return connection(self.address, name, limits_of(self.config))

    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    def evaluations(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "evaluations.jsonl").read_text().splitlines()]


@asynccontextmanager
async def running(config: Config, *, resume: bool = False) -> AsyncIterator[Run]:
    """A coordinator with NUM_ROWS rows, the first NUM_EVAL_ROWS of which are also those of data.eval."""
    resumption = find_resumption(config) if resume else None
    directory = open_run_directory(config, resumption)
    rows = [{"prompt": f"<{i}>", "answer": str(i), "data_source": "test"} for i in range(NUM_ROWS)]
    prompts = [np.array([i], np.int32) for i in range(NUM_ROWS)]
    async with listener() as ours:
        limits = limits_of(config, newest_version=-1)
        limits.run, limits.incarnation = "test.1", "abc"
        coordinator = Coordinator(
            config,
            dataset_of(rows, prompts),
            Mailbox(ours, limits, max_message_bytes=MAX_MESSAGE_BYTES),
            directory,
            eval_dataset=dataset_of(rows[:NUM_EVAL_ROWS], prompts[:NUM_EVAL_ROWS])
            if config.data.eval
            else None,
            resumed=None if resumption is None else resumption.state,
            evaluated=evaluated_versions(directory.path),
        )
        task = asyncio.ensure_future(coordinator.run())
        try:
            yield Run(config, coordinator, ours.address, task, directory.path)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            directory.close()


def play(scenario: Callable[[Run], Awaitable[None]], config: Config) -> None:
    """Runs the scenario against a coordinator of its own, within DEADLINE_S."""

    async def whole() -> None:
        async with asyncio.timeout(DEADLINE_S), running(config) as run:
            await scenario(run)

    asyncio.run(whole())
