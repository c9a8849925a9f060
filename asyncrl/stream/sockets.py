"""The coordinator's socket, and what every socket of the stream has in common.

Every option is set, never inherited; docs/wire.md has the table with reasons. Only loopback addresses can be
bound so far (config/system.py refuses others): the stream is neither encrypted nor authenticated.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from ipaddress import IPv6Address
from types import TracebackType
from typing import Self

import zmq

from asyncrl.errors import ConfigError, PeerLost
from asyncrl.stream.codec import Frame
from asyncrl.stream.readiness import Readiness

MAX_QUEUED_MESSAGES = 1000
"""High-water marks, a peer and a direction. Credits keep a working peer far below."""
LINGER_MS = 1000
"""A closed socket tries so long to deliver its last messages (Stop, Bye, Failed)."""


def parse_address(address: str) -> tuple[str, int]:
    """(host, port) of "127.0.0.1:5", "localhost:5" or "[::1]:5"; the host without brackets.

    Raises ConfigError naming the address.
    """
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})", address)
    host, port = (match[1] or match[2], int(match[3])) if match else ("", 0)
    if match and match[1]:
        try:
            IPv6Address(host)
        except ValueError:
            host = ""
    if not host or not 0 < port < 65536:
        raise ConfigError(
            f"address {address!r} is not HOST:PORT; write 127.0.0.1:4567, localhost:4567 or [::1]:4567"
        )
    return host, port


def join_address(host: str, port: int | str) -> str:
    """The reverse of parse_address: an IPv6 host gets its brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def set_options(socket: zmq.Socket[bytes], is_ipv6: bool, max_message_bytes: int, heartbeat_s: float) -> None:
    """The options that both ends share; before bind or connect."""
    heartbeat_ms = max(1, round(heartbeat_s * 1000))
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    # Of one frame: a larger one closes its connection. Envelope holds whole messages to the same figure.
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    # Only for IPv6 addresses: with it on, 127.0.0.1 would be bound as ::ffff:127.0.0.1.
    socket.setsockopt(zmq.IPV6, int(is_ipv6))
    # ZeroMQ's own heartbeats notice a cable or a stopped process; its I/O thread answers them even while
    # Python is busy, so a hung process is noticed by the Heartbeat messages instead.
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, heartbeat_ms // 3))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, heartbeat_ms)
    socket.setsockopt(zmq.HEARTBEAT_TTL, min(heartbeat_ms, 6_553_000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, heartbeat_ms)


def check_can_bind(bind: str, port: int) -> None:
    """Raises ConfigError when a Listener could not be bound there now. Port 0 is any free one."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.IPV6, int(":" in bind))
        _bind(socket, bind, port)


def _bind(socket: zmq.Socket[bytes], bind: str, port: int) -> None:
    try:
        socket.bind(f"tcp://{join_address(bind, port or '*')}")
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise ConfigError(
                f"stream.port: {port} is in use on {bind}; stop the process that has it, or set another port, or 0 "
                "for a free one"
            ) from None
        raise ConfigError(
            f"stream.bind: {bind!r} with stream.port {port} cannot be bound: {error.strerror}; use an address of "
            "this machine (127.0.0.1 or ::1)"
        ) from None


class Listener:
    """The ROUTER of the coordinator: `async with Listener(...) as listener`.

    Raises ConfigError on entry when the address cannot be bound. One task receives; any task may send.
    """

    address: str = ""
    """HOST:PORT that peers connect to, with the real port when `port` is 0. Set on entry."""

    def __init__(self, bind: str, port: int, *, max_message_bytes: int, heartbeat_s: float) -> None:
        self._bind = bind
        self._port = port
        self._heartbeat_s = heartbeat_s
        self._max_message_bytes = max_message_bytes

    @property
    def endpoint(self) -> str:
        """`address` as ZeroMQ writes it: "tcp://127.0.0.1:4567"."""
        return f"tcp://{self.address}"

    async def __aenter__(self) -> Self:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        set_options(self._socket, ":" in self._bind, self._max_message_bytes, self._heartbeat_s)
        # Mandatory: sending to a peer that left is an error, where the default drops the message silently.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # Handover: a peer that comes back under its name takes over from its old connection, which this side
        # may not know to be dead yet. Without it the new one would be ignored, and the peer wait for ever.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            _bind(self._socket, self._bind, self._port)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        self._readiness = Readiness(self._socket)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._readiness.close()
        self._socket.close()
        # Waits up to LINGER_MS for the last messages to leave.
        await asyncio.to_thread(self._context.term)

    async def recv(self) -> tuple[bytes, list[memoryview]]:
        """The next message: (identity of the peer, frames for `decode`). Waits until there is one."""
        await self._readiness.share_the_loop()
        while True:
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                await self._readiness.wait(zmq.POLLIN)
            else:
                return peer.bytes, [frame.buffer for frame in frames]

    async def send(self, peer: bytes, frames: Sequence[Frame]) -> None:
        """Queues one message. Arrays are sent from where they lie: do not write to them afterwards.

        Never waits. Raises PeerLost at once when no such peer is connected, and when MAX_QUEUED_MESSAGES wait for
        it already: that many only wait for a process that hangs, and the caller has others to serve.
        """
        try:
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            raise PeerLost(
                f"peer {peer!r} leaves {MAX_QUEUED_MESSAGES} messages waiting; its process hangs"
            ) from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerLost(f"peer {peer!r} is not connected any more") from None
        finally:
            self._readiness.wake()
