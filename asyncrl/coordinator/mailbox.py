"""Typed messages between the coordinator and every peer: one socket, one envelope and one sequence a peer."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.errors import WireError
from asyncrl.stream.codec import Limits, Received, decode
from asyncrl.stream.envelope import Envelope, SequenceCheck
from asyncrl.stream.messages import AnyMessage, RankHello, ServerHello
from asyncrl.stream.sockets import Listener
from asyncrl.types import Int32, TrajectoryGroup


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

    async def recv(self) -> tuple[bytes, Received | WireError]:
        """The next message, or why it was refused."""
        peer, frames = await self._listener.recv()
        try:
            received = decode(frames, self.limits, peer=peer, on_header=self._sequences.check)
        except WireError as error:
            return peer, error
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

    def forget(self, peer: bytes) -> None:
        """A peer that left or was given up."""
        self._envelopes.pop(peer, None)
        self._sequences.forget(peer.decode(errors="replace"))
