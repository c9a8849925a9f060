"""What a reward pool and its worker processes say to each other, over the worker's stdin and stdout.

    pool -> worker   RewardSpec, once
    worker -> pool   WorkerReady, once
    pool -> worker   RewardRequest
    worker -> pool   RewardReply, with the request's number

A frame is four bytes of length (little-endian), then one msgpack message.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

LENGTH_BYTES = 4


class RewardSpec(msgspec.Struct, frozen=True):
    """Which reward a worker runs."""

    name: str
    style: str = "auto"
    kwargs: dict[str, Any] = {}
    timeout_s: float = 10.0
    """Of one call. The worker ends asynchronous calls after it; the pool kills a worker that cannot."""
    source: bytes | None = None
    """What the reward's file held when its first worker read it: later workers of a run do not read it again."""


class RewardTraits(msgspec.Struct, frozen=True):
    """What a reward is like: how the pool calls it, and what it asks of the rows."""

    takes_group: bool = False
    """One call has the completions of a whole group."""
    is_async: bool = False
    is_large: bool = False
    """Only one process of it is started: a model."""
    takes_chat: bool = True
    """Whether the prompt may be a list of messages."""
    compares_with: Literal["", "anything", "text", "number"] = ""
    """What it needs the row's answer to be; empty where it reads the row for itself."""
    columns: tuple[str, ...] = ()
    """Columns without which it cannot be called."""


class WorkerReady(msgspec.Struct, frozen=True):
    """The worker has the reward, or says why not."""

    error: str = ""
    traits: RewardTraits = RewardTraits()
    source: bytes | None = None
    """What the reward's file holds; None where it is in no file of its own."""


VOTE = "pred"
"""What verl's rewards call the answer that they read in a completion: maj@N counts it."""


def is_vote(component: str) -> bool:
    """Whether a component (`label/key`) is an answer, whose mean says nothing."""
    return component.endswith(f"/{VOTE}")


class RewardRequest(msgspec.Struct, frozen=True):
    """One call: completions of one prompt, and all that a reward may ask about them."""

    completions: list[str]
    """Their texts, without special tokens: one, unless the reward takes groups."""
    completion_ids: list[list[int]]
    row: dict[str, Any]
    prompt: Any = None
    """The row's prompt: a text, or a list of chat messages."""
    answer: Any = None
    """What the row says is right; None where it says nothing."""
    data_source: str = ""
    number: int = 0
    """Counts the requests to one process: async replies come in any order."""


class RewardValue(msgspec.Struct, frozen=True):
    """What a reward said of one completion."""

    reward: float | None = None
    """None where `error` says why, or where the reward does not apply."""
    error: str = ""
    extras: dict[str, float] = {}
    """The other numbers of a dict with "score"; an answer (VOTE) that is no number as one that stands for it."""


class RewardReply(msgspec.Struct, frozen=True):
    """The answer to a request: a value a completion, or why there is none."""

    number: int
    values: list[RewardValue] = []
    error: str = ""
    timed_out: bool = False


def frame(message: msgspec.Struct) -> bytes:
    """Raises TypeError or ValueError (OverflowError among them) for what msgpack cannot say."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body
