"""What both kinds of connection are made of: a DEALER socket and its monitor. Nothing here waits.

The monitor says what the data socket hides: when the handshake is done, and when the peer is gone.
"""

from __future__ import annotations

import socket as tcp
from collections import deque
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncrl.errors import ConfigError, PeerLost
from asyncrl.stream.codec import Frame, Limits, Received, decode
from asyncrl.stream.envelope import Envelope, SequenceCheck
from asyncrl.stream.sockets import join_address, parse_address, set_options

_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 1000
_STATES: dict[int, str] = {
    zmq.EVENT_CLOSED: "the connection was refused",
    zmq.EVENT_CONNECTED: "something accepted the connection but does not answer as a coordinator does",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "what answers there does not speak ZeroMQ",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the handshake was denied",
}
"""What a monitor event says while there is no connection yet."""


class Link:
    """The socket, its monitor and their state, for one connection's life."""

    def __init__(self, address: str, envelope: Envelope, limits: Limits, heartbeat_s: float) -> None:
        self._host, self._port = parse_address(address)
        self.address = address
        self.envelope = envelope
        self.limits = limits
        self.heartbeat_s = heartbeat_s
        self.is_connected = False
        self.loss: PeerLost | None = None
        """Why there is no connection any more."""
        self._state = "nothing answered"
        self._sequences = SequenceCheck()
        self._arrived: deque[list[memoryview]] = deque()
        """Messages taken off the socket before it was closed for a loss."""

    def resolve(self) -> list[str]:
        """Numeric hosts that the address names (`localhost` may be 127.0.0.1, ::1 or both). May block.

        Raises ConfigError for a name that nobody knows.
        """
        try:
            found = tcp.getaddrinfo(self._host, self._port, type=tcp.SOCK_STREAM)
        except OSError as error:
            raise ConfigError(
                f"address {self.address!r} cannot be resolved ({error}); check its host"
            ) from None
        return sorted({str(entry[4][0]) for entry in found})

    def open(self, hosts: Sequence[str]) -> None:
        """Starts to connect to whichever host answers first; ZeroMQ goes on trying in the background."""
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        is_ipv6 = any(":" in host for host in hosts)
        set_options(self.socket, is_ipv6, self.envelope.max_message_bytes, self.heartbeat_s)
        self.socket.setsockopt(zmq.ROUTING_ID, self.envelope.sender.encode())
        # With IMMEDIATE 1 ZeroMQ would throw away what has arrived unread when the connection breaks. What 0
        # would do instead, queue for a coordinator that is not there, `loss` prevents.
        self.socket.setsockopt(zmq.IMMEDIATE, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self.monitor = self.socket.get_monitor_socket()
        self._endpoints = {f"tcp://{join_address(host, self._port)}" for host in hosts}
        for endpoint in self._endpoints:
            self.socket.connect(endpoint)

    def close(self) -> None:
        """Closes both sockets; queued messages still leave. Idempotent, and does not wait."""
        self.socket.close()
        self.monitor.close()

    def terminate(self) -> None:
        """After `close`: waits up to LINGER_MS for queued messages to leave."""
        self._context.term()

    def read_events(self) -> None:
        """Brings is_connected and loss up to date."""
        while self.loss is None:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            kind, endpoint = event["event"], event["endpoint"].decode()
            if not self.is_connected and kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_connected = True
                for other in self._endpoints - {endpoint}:
                    self.socket.disconnect(other)
                self._endpoints = {endpoint}
            elif not self.is_connected:
                self._state = _STATES.get(kind, self._state)
            elif kind == zmq.EVENT_DISCONNECTED and endpoint in self._endpoints:
                self.loss = PeerLost(f"the coordinator {self.address} is gone: its connection broke")

    def hang_up(self) -> None:
        """After a loss: keeps what has arrived and closes the socket, so that it cannot connect once more."""
        while not self.socket.closed:
            try:
                self._arrived.append(self._take())
            except zmq.Again:
                self.socket.close(linger=0)

    def try_send(self, frames: Sequence[Frame]) -> bool:
        """False where there is no room. Raises PeerLost."""
        if self.loss is not None:
            raise self.loss
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def try_recv(self) -> list[memoryview] | None:
        """A message, None where there is none yet. Raises PeerLost where none will come."""
        if self._arrived:
            return self._arrived.popleft()
        if self.loss is not None:
            raise self.loss
        try:
            return self._take()
        except zmq.Again:
            return None

    def read(self, frames: Sequence[Frame]) -> Received:
        """Decodes; the first message says which run and incarnation this is."""
        received = decode(frames, self.limits, on_header=self._sequences.check)
        for known in (self.envelope, self.limits):
            known.run = known.run or received.header.run
            known.incarnation = known.incarnation or received.header.incarnation
        return received

    def not_reached(self, connect_s: float) -> PeerLost:
        return PeerLost(
            f"the coordinator {self.address} was not reached within {connect_s:g} s (timeouts.connect_s): "
            f"{self._state}; check that it runs, and that the address is the one it printed"
        )

    def not_taken(self) -> PeerLost:
        return PeerLost(
            f"the coordinator {self.address} took no message for {self.heartbeat_s:g} s "
            "(timeouts.heartbeat_s); its process hangs"
        )

    def _take(self) -> list[memoryview]:
        return [frame.buffer for frame in self.socket.recv_multipart(zmq.NOBLOCK, copy=False)]
