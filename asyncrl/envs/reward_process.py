"""The pool's end of one reward worker: starts its process, asks it, kills it, starts another."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys

import msgspec

from asyncrl.envs.reward_messages import (
    LENGTH_BYTES,
    RewardReply,
    RewardRequest,
    RewardSpec,
    WorkerReady,
    frame,
)
from asyncrl.errors import AsyncRLError, ConfigError

START_TIMEOUT_S = 300.0
"""A worker must have imported the reward, and loaded its model, by then."""
KILL_TIMEOUT_S = 10.0
"""A killed worker must be gone by then."""


class WorkerDied(AsyncRLError):
    """A reward worker's process ended in the middle of a reward."""


class RewardProcess:
    """One place in a pool, and the process that fills it at the moment, if any."""

    def __init__(self, spec: RewardSpec) -> None:
        self.spec = spec
        """With the source of the reward's file, once a process has started."""
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[RewardReply]] = {}
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._killed = ""
        """Why the present process was killed; empty while it was not."""
        self.num_started = 0

    @property
    def is_alive(self) -> bool:
        return self._process is not None and not self._killed and self._process.returncode is None

    async def start(self) -> WorkerReady | None:
        """Starts a process unless one is alive (then None). Raises ConfigError, WorkerDied."""
        async with self._starting:
            if self.is_alive:
                return None
            self.kill("another takes its place")
            await self.wait()
            try:
                return await self._start()
            except BaseException:
                self.kill("it did not start")
                raise

    async def ask(self, request: RewardRequest) -> RewardReply:
        """One call. Raises WorkerDied, and TypeError or ValueError for what no message can carry."""
        process, number = self._process, next(self._numbers)
        message = frame(msgspec.structs.replace(request, number=number))
        if process is None or process.stdin is None or not self.is_alive:
            raise WorkerDied("the reward's process ended before it was asked")
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            with contextlib.suppress(ConnectionError):  # it died: the reading task says how
                process.stdin.write(message)
                await process.stdin.drain()
            return await reply
        finally:
            del self._waiting[number]

    def kill(self, why: str) -> None:
        """Kills the process and its children, without waiting. Idempotent."""
        if self._process is not None and not self._killed:
            self._killed = why
            with contextlib.suppress(ProcessLookupError):  # the whole group is gone already
                os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> None:
        """Waits until a killed process is gone and its pipes are closed."""
        if self._process is not None:
            # Past the deadline a child that left the group holds the pipe: nothing more can be done.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    if self._reading is not None:
                        await self._reading
                    await self._process.communicate()
            self._process = self._reading = None

    async def _start(self) -> WorkerReady:
        process = self._process = await asyncio.create_subprocess_exec(
            *worker_command(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # a process group of its own: the reward's children die with it
        )
        self._killed = ""
        self.num_started += 1
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(frame(self.spec))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                ready = msgspec.msgpack.decode(await _receive(process.stdout), type=WorkerReady)
        except TimeoutError:
            raise ConfigError(
                f"reward {self.spec.name!r} was not ready within {START_TIMEOUT_S:g} s; make its import lighter"
            ) from None
        except asyncio.IncompleteReadError:
            raise await self._death(process) from None
        if ready.error:
            raise ConfigError(ready.error)
        self.spec = msgspec.structs.replace(self.spec, source=ready.source)
        self._reading = asyncio.create_task(self._read_replies(process, process.stdout))
        return ready

    async def _read_replies(self, process: asyncio.subprocess.Process, stdout: asyncio.StreamReader) -> None:
        """Gives each reply to the call that waits for it, until the process ends."""
        try:
            while True:
                reply = msgspec.msgpack.decode(await _receive(stdout), type=RewardReply)
                waiting = self._waiting.get(reply.number)
                if waiting is not None and not waiting.done():  # a call that was cancelled waits no longer
                    waiting.set_result(reply)
        except (asyncio.IncompleteReadError, msgspec.MsgspecError):
            died = await self._death(process)
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(died)

    async def _death(self, process: asyncio.subprocess.Process) -> WorkerDied:
        if self._killed:
            return WorkerDied(f"the reward's process was killed: {self._killed}")
        self.kill("it closed its output")
        code = await process.wait()
        return WorkerDied(f"the reward's process ended {how_it_ended(code)}")


def worker_command() -> list[str]:
    """Starts a worker of this process."""
    return [sys.executable, "-m", "asyncrl.envs.reward_worker", str(os.getpid())]


def how_it_ended(code: int) -> str:
    """`with exit code 3`, or `by SIGKILL`: a return code in words."""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


async def _receive(stdout: asyncio.StreamReader) -> bytes:
    header = await stdout.readexactly(LENGTH_BYTES)
    return await stdout.readexactly(int.from_bytes(header, "little"))
