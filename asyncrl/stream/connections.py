"""The sockets of those who connect to the coordinator: rollout servers (asyncio), learner ranks (blocking).

A connection has one life. It is made within `connect_s`, or PeerLost says what was tried; when it breaks,
what arrived before is still delivered, then PeerLost ends it for good, and with it the process: nothing
connects again or is sent again behind its back. A process that is started anew joins as a new one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import zmq

from asyncrl.stream.codec import Frame, Limits, Received
from asyncrl.stream.envelope import Envelope
from asyncrl.stream.link import Link
from asyncrl.stream.messages import AnyMessage
from asyncrl.stream.readiness import Readiness
from asyncrl.types import Int32, TrajectoryGroup


class Connection:
    """The DEALER of a rollout server: `async with Connection(...) as connection` connects.

    The peer knows it as `envelope.sender`. The first message received fills in run and incarnation of
    `envelope` and `limits`, where they are empty. One task receives; any task may send. On entry raises
    PeerLost after connect_s, and ConfigError for an address that is not HOST:PORT.
    """

    def __init__(
        self, address: str, envelope: Envelope, limits: Limits, *, heartbeat_s: float, connect_s: float
    ) -> None:
        self._link = Link(address, envelope, limits, heartbeat_s)
        self._connect_s = connect_s
        self._sending = asyncio.Lock()

    async def __aenter__(self) -> Self:
        link, loop = self._link, asyncio.get_running_loop()
        deadline = loop.time() + self._connect_s
        try:
            async with asyncio.timeout_at(deadline):
                hosts = await asyncio.to_thread(link.resolve)
        except TimeoutError:
            raise link.not_reached(self._connect_s) from None
        link.open(hosts)
        self._readiness = Readiness(link.socket)
        self._monitor_fd = int(link.monitor.getsockopt(zmq.FD))
        loop.add_reader(self._monitor_fd, self._read_events)
        try:
            self._read_events()
            while not link.is_connected:
                await self._readiness.wait(0, deadline - loop.time())
        except BaseException as error:
            await self.__aexit__(None, None, None)
            if isinstance(error, TimeoutError):
                raise link.not_reached(self._connect_s) from None
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._monitor_fd)
        self._readiness.close()
        # Here, not in the thread: one that is cancelled before it starts would leave them open, and a context
        # with open sockets waits for ever when it is collected.
        self._link.close()
        await asyncio.to_thread(self._link.terminate)

    async def send(
        self, body: AnyMessage, groups: Sequence[TrajectoryGroup] = (), prompt_ids: Int32 | None = None
    ) -> None:
        """Queues one message. Arrays are sent from where they lie: do not write to them afterwards.

        Raises PeerLost when the coordinator is gone or takes nothing for heartbeat_s, WireError (nothing is
        sent) when the message is too large or its arrays do not fit the body.
        """
        link, loop = self._link, asyncio.get_running_loop()
        async with self._sending:  # so that sequences leave in order
            frames = link.envelope.seal(body, groups, prompt_ids)
            deadline = loop.time() + link.heartbeat_s
            try:
                while not link.try_send(frames):
                    await self._readiness.wait(zmq.POLLOUT, deadline - loop.time())
            except TimeoutError:
                raise link.not_taken() from None
            finally:
                self._readiness.wake()

    async def recv(self) -> Received:
        """The next message; waits until there is one.

        Raises PeerLost once the coordinator is gone and all that arrived is delivered, WireError for a
        message that is refused (the next recv goes on behind it; a SequenceGap: messages are missing).
        """
        await self._readiness.share_the_loop()
        while (frames := self._link.try_recv()) is None:
            await self._readiness.wait(zmq.POLLIN)
        return self._link.read(frames)

    def _read_events(self) -> None:
        self._link.read_events()
        if self._link.loss:
            self._readiness.close()
            self._link.hang_up()
        elif self._link.is_connected:
            self._readiness.wake_all()


class BlockingConnection:
    """The DEALER of a learner rank: `with BlockingConnection(...) as connection` connects.

    As `Connection`, without asyncio. It belongs to one thread.
    """

    def __init__(
        self, address: str, envelope: Envelope, limits: Limits, *, heartbeat_s: float, connect_s: float
    ) -> None:
        self._link = Link(address, envelope, limits, heartbeat_s)
        self._connect_s = connect_s

    def __enter__(self) -> Self:
        link = self._link
        deadline = time.monotonic() + self._connect_s
        link.open(link.resolve())
        try:
            self._read_events()
            while not link.is_connected:
                if not link.monitor.poll(_left_ms(deadline)) and time.monotonic() >= deadline:
                    raise link.not_reached(self._connect_s)
                self._read_events()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits up to LINGER_MS for the last messages to leave."""
        self._link.close()
        self._link.terminate()

    def send(
        self, body: AnyMessage, groups: Sequence[TrajectoryGroup] = (), prompt_ids: Int32 | None = None
    ) -> None:
        """Queues one message; errors as `Connection.send`."""
        self._read_events()
        frames: list[Frame] = self._link.envelope.seal(body, groups, prompt_ids)
        deadline = time.monotonic() + self._link.heartbeat_s
        while not self._link.try_send(frames):
            if time.monotonic() >= deadline:
                raise self._link.not_taken()
            self._wait(zmq.POLLOUT, deadline)

    def recv(self, timeout_s: float) -> Received:
        """The next message; errors as `Connection.recv`, and TimeoutError after timeout_s.

        With timeout_s 0 it takes only what is here already.
        """
        deadline = time.monotonic() + timeout_s
        self._read_events()
        while (frames := self._link.try_recv()) is None:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the coordinator {self._link.address} sent nothing for {timeout_s:g} s")
            self._wait(zmq.POLLIN, deadline)
        return self._link.read(frames)

    def _wait(self, events: int, deadline: float) -> None:
        """Until one of the events, news from the monitor, or the deadline."""
        poller = zmq.Poller()
        poller.register(self._link.socket, events)
        poller.register(self._link.monitor, zmq.POLLIN)
        poller.poll(_left_ms(deadline))
        self._read_events()

    def _read_events(self) -> None:
        self._link.read_events()
        if self._link.loss:
            self._link.hang_up()


def _left_ms(deadline: float) -> int:
    return max(0, round((deadline - time.monotonic()) * 1000))
