"""Rewards, run in subprocesses that can be killed. One pool a rollout server.

    async with RewardPool("gsm8k_strict", num_workers=2, timeout_s=10.0) as pool:
        outcome = await pool.score(completion, row)

A reward that runs too long, kills its process or is cancelled costs its worker: the process group is
killed, and a fresh process takes its place before the worker is used again. So the pool never shrinks, and
nothing a reward does can hold the rollout server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from asyncrl.envs.env import RewardOutcome
from asyncrl.envs.reward_worker import LENGTH_BYTES, pack
from asyncrl.errors import AsyncRLError, ConfigError, one_line
from asyncrl.types import Status

START_TIMEOUT_S = 60.0
"""A worker must have imported the reward by then."""
KILL_TIMEOUT_S = 10.0
"""A killed worker must be gone by then."""


@dataclass(slots=True, frozen=True)
class RewardStatistics:
    """Counts since the pool was made."""

    num_scored: int = 0
    num_failed: int = 0
    num_timeouts: int = 0
    num_cancelled: int = 0
    num_processes_started: int = 0
    last_failure: str = ""
    """Detail of the latest outcome without a reward."""


class WorkerDied(AsyncRLError):
    """A reward worker's process ended in the middle of a reward."""


class RewardPool:
    """`num_workers` reward processes; at most so many rewards run at once, and more wait their turn.

    `timeout_s` is the deadline of one reward, counted from when a worker takes it.
    """

    def __init__(
        self, reward: str, answer_key: str = "answer", num_workers: int = 1, timeout_s: float = 10.0
    ) -> None:
        if num_workers < 1:
            raise ConfigError(f"a reward pool of {num_workers} workers scores nothing; use at least 1")
        self._timeout_s = timeout_s
        self._workers = [_Worker(reward, answer_key) for _ in range(num_workers)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        for worker in self._workers:
            self._idle.put_nowait(worker)
        self._closed = False
        self._statistics = RewardStatistics()

    async def __aenter__(self) -> RewardPool:
        """Starts the workers. Raises ConfigError when the reward cannot be imported."""
        try:
            results = await asyncio.gather(*(w.start() for w in self._workers), return_exceptions=True)
            if errors := [result for result in results if isinstance(result, BaseException)]:
                raise errors[0]
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    def statistics(self) -> RewardStatistics:
        """A snapshot of the counts."""
        return replace(
            self._statistics, num_processes_started=sum(w.num_processes_started for w in self._workers)
        )

    async def score(self, completion: str, row: dict[str, Any]) -> RewardOutcome:
        """Scores one completion. A failure of any kind is an outcome, never an exception."""
        worker = await self._idle.get()
        finished = False
        try:
            outcome = await self._score_on(worker, completion, row)
            finished = True
        except asyncio.CancelledError:
            self._count(num_cancelled=1)
            raise
        finally:
            if not finished:
                worker.kill()
            self._idle.put_nowait(worker)
        self._count(
            num_scored=outcome.status is Status.SCORED,
            num_failed=outcome.status is Status.REWARD_FAILED,
            num_timeouts=outcome.status is Status.REWARD_TIMEOUT,
            last_failure=outcome.detail,
        )
        return outcome

    async def _score_on(self, worker: _Worker, completion: str, row: dict[str, Any]) -> RewardOutcome:
        if self._closed:
            return RewardOutcome(None, Status.REWARD_FAILED, "the reward pool is closed")
        try:
            frame = pack({"completion": completion, "row": row})
            if not worker.is_alive:
                await worker.start()
            async with asyncio.timeout(self._timeout_s):
                reply = await worker.ask(frame)
        except TimeoutError:
            worker.kill()
            detail = f"the reward ran past {self._timeout_s} s (timeouts.reward_s) and was killed"
            return RewardOutcome(None, Status.REWARD_TIMEOUT, detail)
        except AsyncRLError as error:
            return RewardOutcome(None, Status.REWARD_FAILED, str(error))
        except (OSError, TypeError, ValueError, OverflowError) as error:  # no process, or no JSON values
            return RewardOutcome(None, Status.REWARD_FAILED, one_line(error))
        if "error" in reply:
            return RewardOutcome(None, Status.REWARD_FAILED, reply["error"])
        return RewardOutcome(reply["reward"], Status.SCORED)

    def _count(self, *, last_failure: str = "", **increments: int) -> None:
        now = {name: getattr(self._statistics, name) + count for name, count in increments.items()}
        last_failure = last_failure or self._statistics.last_failure
        self._statistics = replace(self._statistics, last_failure=last_failure, **now)

    async def _close(self) -> None:
        self._closed = True
        for worker in self._workers:
            worker.kill()
        # Scores that were running meet a dead worker and give it back; only then is its pipe free to drain.
        for _ in self._workers:
            await (await self._idle.get()).wait()


class _Worker:
    """One place in the pool, and the process that fills it at the moment."""

    def __init__(self, reward: str, answer_key: str) -> None:
        self._reward = reward
        self._answer_key = answer_key
        self._process: asyncio.subprocess.Process | None = None
        self._killed = False
        self.num_processes_started = 0

    @property
    def is_alive(self) -> bool:
        return self._process is not None and not self._killed and self._process.returncode is None

    async def start(self) -> None:
        """Starts a process in place of the last one. Raises ConfigError, or WorkerDied."""
        self.kill()
        await self.wait()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "asyncrl.envs.reward_worker",
            str(os.getpid()),
            self._answer_key,
            self._reward,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # a process group of its own: the reward's children die with it
        )
        self._killed = False
        self.num_processes_started += 1
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                reply = await self._receive(self._process)
            if "error" in reply:
                raise ConfigError(reply["error"])
        except TimeoutError:
            self.kill()
            raise ConfigError(
                f"importing reward {self._reward!r} took longer than {START_TIMEOUT_S} s; make it lighter"
            ) from None
        except BaseException:
            self.kill()
            raise

    async def ask(self, frame: bytes) -> dict[str, Any]:
        """Sends one request and waits for its reply. Raises WorkerDied."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it died: the read below says how
            process.stdin.write(frame)
            await process.stdin.drain()
        return await self._receive(process)

    def kill(self) -> None:
        """Kills the process and its children, without waiting. Idempotent."""
        if self._process is not None and not self._killed:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):  # the whole group is gone already
                os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> None:
        """Waits until a killed process is gone and its pipes are closed."""
        if self._process is not None:
            # Past the deadline a child that left the group holds the pipe: nothing more can be done.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    await self._process.communicate()
            self._process = None

    async def _receive(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None
        try:
            header = await process.stdout.readexactly(LENGTH_BYTES)
            body = await process.stdout.readexactly(int.from_bytes(header, "little"))
        except asyncio.IncompleteReadError:
            self.kill()
            code = await process.wait()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            raise WorkerDied(f"the reward's process ended {how}") from None
        return msgpack.unpackb(body)
