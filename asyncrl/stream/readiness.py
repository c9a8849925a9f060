"""Lets tasks of an asyncio loop wait for events of a ZeroMQ socket. Used by sockets.py and connections.py.

zmq.asyncio is not used: its waits know nothing of a connection's monitor, and reading a socket there that is
never empty would keep the loop from all other tasks.
"""

from __future__ import annotations

import asyncio

import zmq

_USES_A_TURN = 32


class Readiness:
    """Watches one socket on the running loop.

    ZeroMQ's file descriptor says only that something changed since the socket was last used, by whichever
    task. So whoever uses the socket calls `wake` afterwards, which looks at the events themselves.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[asyncio.Future[None], int] = {}
        self._num_uses = 0
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._changed)

    async def wait(self, events: int, timeout_s: float | None = None) -> None:
        """Returns at one of the events, or at wake_all, and may return early. Raises TimeoutError."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters[waiter] = events
        self.wake()
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        finally:
            del self._waiters[waiter]

    async def share_the_loop(self) -> None:
        """Called before each receive: a socket that is never empty would keep the loop from other tasks."""
        self._num_uses += 1
        if self._num_uses % _USES_A_TURN == 0:
            await asyncio.sleep(0)

    def wake(self) -> None:
        """Lets the tasks go on whose events have come."""
        if self._waiters and not self._socket.closed:
            self._changed()

    def _changed(self) -> None:
        # Asking for the events also resets the descriptor: without it the loop would spin on it.
        ready = int(self._socket.getsockopt(zmq.EVENTS))
        for waiter, events in self._waiters.items():
            if ready & events and not waiter.done():
                waiter.set_result(None)

    def wake_all(self) -> None:
        """Lets every waiting task go on: something else than the socket has changed."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self.wake_all()
