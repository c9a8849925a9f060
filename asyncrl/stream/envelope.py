"""Headers of one sender, and the check that none of its messages is missing."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.errors import WireError
from asyncrl.stream.codec import WIRE_VERSION, Frame, encode
from asyncrl.stream.messages import AnyMessage, Header, RankHello, ServerHello
from asyncrl.types import Int32, TrajectoryGroup

MAX_SENDERS = 100_000
"""Whose sequences one process follows at most: strangers cannot make it grow beyond some 20 MB."""


class SequenceGap(WireError):
    """Messages of a sender are missing. Its connection is not to be trusted: treat the peer as lost."""


class Envelope:
    """Makes the messages of one sender to ONE peer: the coordinator has one for each peer that said Hello.

    `run` and `incarnation` stay empty until the sender knows them (a connection fills them in).
    """

    def __init__(self, sender: str, *, max_message_bytes: int, run: str = "", incarnation: str = "") -> None:
        self.sender = sender
        self.max_message_bytes = max_message_bytes
        self.run = run
        self.incarnation = incarnation
        self.next_sequence = 0

    def seal(
        self, body: AnyMessage, groups: Sequence[TrajectoryGroup] = (), prompt_ids: Int32 | None = None
    ) -> list[Frame]:
        """Frames of the next message.

        Raises WireError, without counting the message, for arrays that do not fit the body and above
        max_message_bytes: ZeroMQ would close the connection of such a message without a word to its sender.
        """
        header = Header(WIRE_VERSION, self.run, self.incarnation, self.sender, self.next_sequence, body)
        frames = encode(header, groups, prompt_ids)
        num_bytes = sum(map(len, frames))
        if num_bytes > self.max_message_bytes:
            raise WireError(
                f"a {type(body).__name__} of {num_bytes} bytes exceeds stream.max_message_bytes "
                f"{self.max_message_bytes}: raise it, or make groups smaller (from {self.sender!r})"
            )
        self.next_sequence += 1
        return frames


class SequenceCheck:
    """The sequence that each sender's next message must have. Give `check` to `decode` as its on_header.

    It remembers MAX_SENDERS, and forgets the one that has been silent for longest when a new one comes:
    strangers cannot make it grow without end.
    """

    def __init__(self) -> None:
        self._expected: dict[str, int] = {}

    def check(self, header: Header) -> None:
        """Counts the message. A Hello with sequence 0 starts its sender anew.

        Raises SequenceGap where messages are missing (and goes on from there, so that a gap is one error),
        and WireError for a message that was here already.
        """
        expected = self._expected.get(header.sender, 0)
        if header.sequence == 0 and isinstance(header.body, ServerHello | RankHello):
            expected = 0
        if header.sequence < expected:
            raise WireError(
                f"sequence is {header.sequence}: repeated, expected {expected} (from {header.sender!r})"
            )
        self._expected.pop(header.sender, None)  # so that the longest silent sender stands first
        self._expected[header.sender] = header.sequence + 1
        if len(self._expected) > MAX_SENDERS:
            del self._expected[next(iter(self._expected))]
        if header.sequence > expected:
            raise SequenceGap(
                f"gap: sequence is {header.sequence}, expected {expected}: "
                f"{header.sequence - expected} messages are missing (from {header.sender!r})"
            )

    def forget(self, sender: str) -> None:
        """Drops a sender that left; it starts from 0 if it returns."""
        self._expected.pop(sender, None)
