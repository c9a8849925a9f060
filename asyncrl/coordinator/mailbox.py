"""Typed messages between the coordinator and every peer: one socket, one envelope and one sequence a peer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from asyncrl.errors import PeerLost, WireError
from asyncrl.stream.codec import Limits, Received, decode
from asyncrl.stream.envelope import Envelope, SequenceCheck
from asyncrl.stream.messages import AnyMessage, EvalFinished, GroupFinished, Header, RankHello, ServerHello
from asyncrl.stream.sockets import Listener
from asyncrl.types import Int32, TrajectoryGroup


@dataclass(slots=True, frozen=True)
class Refusal:
    """A message that breaks the schema."""

    error: WireError
    group: tuple[int, int] | None = None
    """(ordinal, redraw) when it was a finished group."""
    evaluated: tuple[int, int] | None = None
    """(version, row_index) when it was a finished group of an evaluation."""


class Mailbox:
    """Wraps the listener. `limits` is what messages are validated against; its owner keeps it up to date."""

    def __init__(self, listener: Listener, limits: Limits, *, max_message_bytes: int) -> None:
        self._listener = listener
        self.limits = limits
        self._max_message_bytes = max_message_bytes
        self._envelopes: dict[bytes, Envelope] = {}
        self._sequences = SequenceCheck()

    @property
    def address(self) -> str:
        """What `--connect` takes."""
        return self._listener.address

    async def recv(self) -> tuple[bytes, Received | Refusal]:
        """The next message, or why it was refused."""
        peer, frames = await self._listener.recv()
        group: tuple[int, int] | None = None
        evaluated: tuple[int, int] | None = None

        def look_at(header: Header) -> None:
            nonlocal group, evaluated
            self._sequences.check(header)
            if isinstance(header.body, GroupFinished):
                group = header.body.group.ordinal, header.body.group.redraw
            if isinstance(header.body, EvalFinished):
                evaluated = header.body.version, header.body.group.ordinal

        try:
            received = decode(frames, self.limits, peer=peer, on_header=look_at)
        except WireError as error:
            return peer, Refusal(error, group, evaluated)
        if isinstance(received.body, ServerHello | RankHello):  # a peer that starts anew counts anew
            self._envelopes[peer] = Envelope(
                "coordinator",
                max_message_bytes=self._max_message_bytes,
                run=self.limits.run,
                incarnation=self.limits.incarnation,
            )
        return peer, received

    async def send(
        self,
        peer: bytes,
        body: AnyMessage,
        groups: Sequence[TrajectoryGroup] = (),
        prompt_ids: Int32 | None = None,
    ) -> None:
        """Raises PeerLost when the peer is gone or takes nothing."""
        envelope = self._envelopes.get(peer)
        if envelope is not None:
            await self._listener.send(peer, envelope.seal(body, groups, prompt_ids))

    async def tell(self, peer: bytes, body: AnyMessage) -> None:
        """`send` to a peer that may be gone already, and need not hear it."""
        with suppress(PeerLost):
            await self.send(peer, body)

    def forget(self, peer: bytes) -> None:
        """A peer that left or was given up."""
        self._envelopes.pop(peer, None)
        self._sequences.forget(peer.decode(errors="replace"))
