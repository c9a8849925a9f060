"""The gate between submitting requests and updating weights.

vLLM fixes a request's prefix-cache salt when it is added and decides on a cache hit when it is first
scheduled. So no request may wait inside vLLM across an update: submissions pass only while the gate is
open, and closing it waits until each one that passed has been scheduled. `VllmEngine` is its only user.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asyncrl.errors import EngineError


class Submission:
    """One request that has passed the gate."""

    def __init__(self, gate: Gate, request_id: str) -> None:
        self._gate = gate
        self._request_id = request_id

    def scheduled(self) -> None:
        """The engine has begun with the request (its first token is here). Idempotent."""
        self._gate._forget(self._request_id)


class Gate:
    """Closed when made. Belongs to one event loop."""

    def __init__(self) -> None:
        self._is_open = False
        self._failure: Exception | None = None
        self._moved = asyncio.Event()
        self._unscheduled: set[str] = set()
        self._drained = asyncio.Event()
        self._drained.set()

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def failure(self) -> Exception | None:
        """What the gate was failed with."""
        return self._failure

    @asynccontextmanager
    async def submission(self, request_id: str) -> AsyncIterator[Submission]:
        """Waits until the gate is open. `close` cannot return between here and `Submission.scheduled`.

        Leaving the context counts as scheduled: the request ended, or was never submitted. Raises what the
        gate was `fail`ed with.
        """
        while not self._is_open:
            if self._failure is not None:
                raise self._failure
            self._moved.clear()
            await self._moved.wait()
        if request_id in self._unscheduled:
            raise EngineError(f"request id {request_id!r} is already being submitted; ids must be unique")
        self._unscheduled.add(request_id)
        self._drained.clear()
        submission = Submission(self, request_id)
        try:
            yield submission
        finally:
            submission.scheduled()

    async def close(self, timeout_s: float) -> None:
        """Lets nobody pass any more and waits until all who passed are scheduled.

        Raises EngineError after `timeout_s`, with the gate open again if it was.
        """
        was_open, self._is_open = self._is_open, False
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()
        except TimeoutError as error:
            waiting = sorted(self._unscheduled)
            if was_open:
                self.open()
            raise EngineError(
                f"{len(waiting)} requests were not scheduled within {timeout_s} s, among them {waiting[0]}"
            ) from error

    def open(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._is_open = True
        self._moved.set()

    def fail(self, failure: Exception) -> None:
        """Closes for good: those who wait, and those who come, get `failure`. The first failure stays."""
        self._is_open = False
        self._failure = self._failure or failure
        self._moved.set()

    def _forget(self, request_id: str) -> None:
        self._unscheduled.discard(request_id)
        if not self._unscheduled:
            self._drained.set()
