"""One reward, run in subprocesses that can be killed. A rollout server has one pool for each of its rewards.

    async with RewardPool(RewardSpec("gsm8k_strict"), num_workers=2) as pool:
        [outcome] = await pool.score(RewardRequest([completion], [token_ids], row, answer="72"))

A call that runs too long, kills its process or is cancelled costs its worker: the process group is killed, and
a fresh process takes its place before it is used again. So the pool never shrinks, and nothing a reward does
can hold the rollout server.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from asyncrl.envs.env import RewardOutcome
from asyncrl.envs.reward_messages import RewardReply, RewardRequest, RewardSpec, RewardTraits
from asyncrl.envs.reward_process import RewardProcess
from asyncrl.errors import AsyncRLError, ConfigError, one_line
from asyncrl.types import Status

MAX_ASYNC_CALLS = 64
"""Calls of an async reward that run at once, on the event loop of one process."""
ASYNC_GRACE_S = 2.0
"""An async call ends itself at its deadline. So long after it, the event loop must be blocked: it is killed."""


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


class RewardPool:
    """At most `num_workers` calls run at once, each in a process; more wait their turn.

    Of an async reward MAX_ASYNC_CALLS run in one process; of a model one call runs. Processes after the first
    start when they are first needed. The deadline, `spec.timeout_s`, counts from when a worker takes the call.
    """

    def __init__(self, spec: RewardSpec, num_workers: int = 1) -> None:
        if num_workers < 1:
            raise ConfigError(f"a reward pool of {num_workers} workers scores nothing; use at least 1")
        self._spec = spec
        self._num_workers = num_workers
        self._processes = [RewardProcess(spec)]
        # The one used last first: as few processes are started as calls overlap.
        self._free: asyncio.LifoQueue[RewardProcess] = asyncio.LifoQueue()
        self._num_places = 0
        self._traits = RewardTraits()
        self._closed = False
        self._statistics = RewardStatistics()

    async def __aenter__(self) -> RewardPool:
        """Starts a worker. Raises ConfigError when the reward cannot be imported or loaded."""
        try:
            ready = await self._processes[0].start()
        except BaseException:
            await self._close()
            raise
        assert ready is not None
        self._traits = ready.traits
        if self._traits.is_async:
            places = self._processes * MAX_ASYNC_CALLS
        elif self._traits.is_large:
            places = self._processes
        else:
            self._processes += [RewardProcess(self._processes[0].spec) for _ in range(self._num_workers - 1)]
            places = self._processes
        self._num_places = len(places)
        for process in reversed(places):
            self._free.put_nowait(process)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    @property
    def takes_group(self) -> bool:
        """Whether a request holds a whole group's completions instead of one."""
        return self._traits.takes_group

    def statistics(self) -> RewardStatistics:
        """A snapshot of the counts."""
        num_started = sum(process.num_started for process in self._processes)
        return replace(self._statistics, num_processes_started=num_started)

    async def score(self, request: RewardRequest) -> list[RewardOutcome]:
        """One outcome a completion. A failure of any kind is an outcome, never an exception.

        `components` holds what the reward returned besides its number. An outcome that is SCORED without a
        reward: the reward does not apply to that completion.
        """
        process = await self._free.get()
        finished = False
        try:
            outcomes = await self._score_on(process, request)
            finished = True
        except asyncio.CancelledError:
            self._count(num_cancelled=1)
            raise
        finally:
            if not finished and not self._traits.is_async:  # others' calls run in an async reward's process
                process.kill("its call was cancelled")
            self._free.put_nowait(process)
        for outcome in outcomes:
            self._count(
                num_scored=outcome.status is Status.SCORED,
                num_failed=outcome.status is Status.REWARD_FAILED,
                num_timeouts=outcome.status is Status.REWARD_TIMEOUT,
                last_failure=outcome.detail,
            )
        return outcomes

    async def _score_on(self, process: RewardProcess, request: RewardRequest) -> list[RewardOutcome]:
        try:
            reply = await self._ask(process, request)
        except TimeoutError:
            process.kill("a call ran past its deadline, and held up the others")
            return self._all(request, Status.REWARD_TIMEOUT, self._too_long)
        except AsyncRLError as error:
            return self._all(request, Status.REWARD_FAILED, str(error))
        except (OSError, TypeError, ValueError, OverflowError) as error:  # no process, or no JSON values
            return self._all(request, Status.REWARD_FAILED, one_line(error))
        if reply.timed_out:
            return self._all(request, Status.REWARD_TIMEOUT, self._too_long)
        if reply.error:
            return self._all(request, Status.REWARD_FAILED, reply.error)
        return [
            RewardOutcome(None, Status.REWARD_FAILED, value.error)
            if value.error
            else RewardOutcome(value.reward, Status.SCORED, components=value.extras)
            for value in reply.values
        ]

    async def _ask(self, process: RewardProcess, request: RewardRequest) -> RewardReply:
        if self._closed:
            raise AsyncRLError("the reward pool is closed")
        await process.start()
        deadline_s = self._spec.timeout_s + (ASYNC_GRACE_S if self._traits.is_async else 0.0)
        async with asyncio.timeout(deadline_s):
            return await process.ask(request)

    @property
    def _too_long(self) -> str:
        return f"it ran past {self._spec.timeout_s:g} s (timeouts.reward_s) and was ended"

    def _all(self, request: RewardRequest, status: Status, detail: str) -> list[RewardOutcome]:
        return [RewardOutcome(None, status, detail)] * len(request.completions)

    def _count(self, *, last_failure: str = "", **increments: int) -> None:
        now = {name: getattr(self._statistics, name) + count for name, count in increments.items()}
        last_failure = last_failure or self._statistics.last_failure
        self._statistics = replace(self._statistics, last_failure=last_failure, **now)

    async def _close(self) -> None:
        self._closed = True
        for process in self._processes:
            process.kill("the reward pool is closed")
        # Calls that were running meet a dead worker and give it back; only then is its pipe free to drain.
        for _ in range(self._num_places):
            await self._free.get()
        for process in self._processes:
            await process.wait()
