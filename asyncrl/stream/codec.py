"""Messages as frames, and back: one msgpack header, then one raw little-endian buffer an array.

Called by envelope.py (encode) and by whoever receives: the coordinator and connections.py (decode).
docs/wire.md shows the bytes. Nothing here executes what it reads: msgspec fills typed structs, numpy views
buffers. Arrays are not copied: encode sends the arrays' own memory (it gathers the trajectories of a group
once, unless they already lie end to end), decode returns read-only views of the frames.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from asyncrl.errors import WireError
from asyncrl.stream.messages import (
    AnyMessage,
    Batch,
    EvalFinished,
    EvalLease,
    GroupFields,
    GroupFinished,
    Header,
    Lease,
    TrajectoryFields,
)
from asyncrl.stream.validation import (
    WIRE_VERSION,
    Limits,
    Refuse,
    check_arrays,
    check_body,
    check_header,
    check_ids,
    refuser,
    wrong_wire_version,
)
from asyncrl.types import Int32, Trajectory, TrajectoryGroup

__all__ = ["WIRE_VERSION", "Frame", "Limits", "Received", "decode", "encode", "group_fields"]

if sys.byteorder != "little":
    raise ImportError(f"the wire is little-endian and this host is {sys.byteorder}-endian")

Frame = bytes | memoryview

_DTYPES = {"int32": np.dtype("<i4"), "uint8": np.dtype("u1"), "float32": np.dtype("<f4")}
_TOKEN_ARRAYS = (
    ("token_ids", "int32"),
    ("loss_mask", "uint8"),
    ("rollout_logprobs", "float32"),
    ("policy_versions", "int32"),
)
_GROUP_DTYPES = ["int32", *(dtype for _, dtype in _TOKEN_ARRAYS)]
"""prompt_ids, then the token arrays."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


@dataclass(slots=True, frozen=True)
class Received:
    """A message that keeps every rule."""

    header: Header
    groups: list[TrajectoryGroup] = field(default_factory=list)
    """GroupFinished, EvalFinished: one. Batch: those of body.groups, in that order. Arrays are read-only views."""
    prompt_ids: Int32 | None = None
    """Lease, EvalLease: [P]. None otherwise."""

    @property
    def body(self) -> AnyMessage:
        return self.header.body


def group_fields(group: TrajectoryGroup) -> GroupFields:
    """What the header says of a group; its arrays travel behind the header."""
    trajectories = [
        TrajectoryFields(
            len(t),
            None if t.reward is None else float(t.reward),
            t.status,
            t.finish_reason,
            t.text,
            t.detail,
            t.reward_components,
        )
        for t in group.trajectories
    ]
    return GroupFields(group.ordinal, group.redraw, trajectories, group.spans)


def encode(
    header: Header, groups: Sequence[TrajectoryGroup] = (), prompt_ids: Int32 | None = None
) -> list[Frame]:
    """Frames of one message. `header.arrays` is filled in here; the body must describe these groups.

    Raises WireError for arrays that do not fit the body, or of another dtype or shape than theirs.
    """
    refuse = refuser(header.sender)
    carried = len(groups), prompt_ids is not None
    if carried != (expected := (len(_groups_of(header.body)), isinstance(header.body, Lease | EvalLease))):
        rule = f"a {type(header.body).__name__} like this one carries {expected}"
        raise refuse("(groups, has prompt_ids)", carried, rule)
    arrays: list[tuple[str, np.ndarray]] = [] if prompt_ids is None else [("prompt_ids", prompt_ids)]
    dtypes = [] if prompt_ids is None else ["int32"]
    for group, fields in zip(groups, _groups_of(header.body), strict=True):
        arrays += _arrays_of(group, fields, refuse)
        dtypes += _GROUP_DTYPES
    frames: list[Frame] = []
    for (name, array), dtype in zip(arrays, dtypes, strict=True):
        if array.dtype != _DTYPES[dtype] or array.ndim != 1:
            raise refuse(name, f"{array.ndim}-d {array.dtype}", f"it is sent as 1-d {dtype}")
        # A memoryview without elements cannot be cast to bytes.
        frames.append(np.ascontiguousarray(array).data.cast("B") if len(array) else b"")
    lengths = [(dtype, len(array)) for dtype, (_, array) in zip(dtypes, arrays, strict=True)]
    return [_encoder.encode(msgspec.structs.replace(header, arrays=lengths)), *frames]


def decode(
    frames: Sequence[Frame],
    limits: Limits,
    *,
    peer: bytes | str = "",
    on_header: Callable[[Header], None] | None = None,
) -> Received:
    """The message in these frames, checked against the schema and the limits.

    `peer` is the identity that a ROUTER knows the sender by; the header must name the same. `on_header`
    runs as soon as the header is good: with `SequenceCheck.check`, a message that is refused for its
    arrays still counts in its sender's sequence. Raises WireError that names field, value and sender, and
    nothing else, whatever the bytes are.
    """
    peer = peer if isinstance(peer, str) else peer.decode(errors="backslashreplace")
    if not frames:
        raise refuser(peer)("frames", 0, "a message has a header")
    header = _decode_header(frames[0], peer)
    refuse = refuser(header.sender)
    check_header(header, limits, peer, refuse)
    if on_header is not None:
        on_header(header)
    body = header.body
    fields = _groups_of(body)
    dtypes = ["int32"] if isinstance(body, Lease | EvalLease) else _GROUP_DTYPES * len(fields)
    arrays = _view_arrays(header, frames[1:], dtypes, refuse)
    check_body(header, limits, refuse)
    if isinstance(body, Lease | EvalLease):
        check_ids(arrays[0], "prompt_ids", limits, refuse)
        return Received(header, prompt_ids=arrays[0])
    newest_version = body.plan.index if isinstance(body, Batch) else limits.newest_version
    groups = []
    for index, group in enumerate(fields):
        name = f"body.groups[{index}]" if isinstance(body, Batch) else "body.group"
        prompt_ids, *tokens = arrays[5 * index : 5 * index + 5]
        num_tokens = sum(fields.num_tokens for fields in group.trajectories)
        for (array_name, _), array in zip(_TOKEN_ARRAYS, tokens, strict=True):
            if len(array) != num_tokens:
                raise refuse(f"{name}.{array_name} length", len(array), f"num_tokens add up to {num_tokens}")
        ids, mask, logprobs, versions = tokens
        check_arrays(group, name, (prompt_ids, ids, mask, logprobs, versions), limits, newest_version, refuse)
        groups.append(_group(group, prompt_ids, tokens))
    return Received(header, groups)


def _decode_header(frame: Frame, peer: str) -> Header:
    try:
        header = _decoder.decode(frame)
        # What repeats a key, or says something in more bytes than it takes, comes out shorter than it went
        # in. The second, slower comparison is for an integer where the schema has a float.
        raw = bytes(frame)
        is_plain = _encoder.encode(header) == raw or _encoder.encode(msgspec.msgpack.decode(raw)) == raw
    except (ValueError, TypeError, RecursionError) as error:
        raise _explain(error, frame, peer) from None
    if not is_plain:
        rule = "it repeats a key, or is not encoded as asyncrl encodes it"
        raise refuser(peer or header.sender)("header", bytes(frame[:24]), rule)
    return header


def _explain(error: Exception, frame: Frame, peer: str) -> WireError:
    """Adds the value and the sender, as far as they can be read, to what msgspec says of a header."""
    try:
        value: Any = msgspec.msgpack.decode(frame)
    except (ValueError, TypeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        return refuser(peer)("header", bytes(frame[:24]), str(error))
    sender = peer or value.get("sender")
    refuse = refuser(sender if isinstance(sender, str) else repr(sender))
    if value.get("wire") != WIRE_VERSION:
        return wrong_wire_version(value.get("wire"), refuse)
    rule, _, path = str(error).partition(" - at `$.")
    path = path.rstrip("`")
    for step in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, list) and step.isdigit() and int(step) < len(value):
            value = value[int(step)]
        elif isinstance(value, dict):
            value = value.get(step)
    return refuse(path or "header", value, rule)


def _view_arrays(
    header: Header, frames: Sequence[Frame], dtypes: Sequence[str], refuse: Refuse
) -> list[np.ndarray]:
    """The frames as arrays, each with the dtype that its place demands."""
    declared = [dtype for dtype, _ in header.arrays]
    if declared != dtypes:
        raise refuse("arrays", declared, f"a {type(header.body).__name__} like this one has {dtypes}")
    if len(frames) != len(dtypes):
        raise refuse("frames", len(frames), f"the header declares {len(dtypes)} arrays")
    arrays = []
    for index, (frame, (dtype, length)) in enumerate(zip(frames, header.arrays, strict=True)):
        buffer = memoryview(frame).toreadonly()
        if buffer.nbytes != length * _DTYPES[dtype].itemsize:
            rule = f"the header declares {length} elements of {dtype}"
            raise refuse(f"frame {index + 1} bytes", buffer.nbytes, rule)
        arrays.append(np.frombuffer(buffer, _DTYPES[dtype]))
    return arrays


def _group(fields: GroupFields, prompt_ids: Int32, tokens: Sequence[np.ndarray]) -> TrajectoryGroup:
    """The record: each trajectory is a view of its stretch of the four token arrays."""
    ids, mask, logprobs, versions = tokens
    trajectories, start = [], 0
    for t in fields.trajectories:
        part = slice(start, start := start + t.num_tokens)
        trajectories.append(
            Trajectory(
                ids[part],
                mask[part],
                logprobs[part],
                versions[part],
                t.reward,
                t.status,
                t.finish_reason,
                t.text,
                t.detail,
                t.reward_components,
            )
        )
    return TrajectoryGroup(fields.ordinal, fields.redraw, prompt_ids, trajectories, fields.spans)


def _groups_of(body: AnyMessage) -> Sequence[GroupFields]:
    if isinstance(body, GroupFinished | EvalFinished):
        return (body.group,)
    return body.groups if isinstance(body, Batch) else ()


def _arrays_of(group: TrajectoryGroup, fields: GroupFields, refuse: Refuse) -> list[tuple[str, np.ndarray]]:
    """prompt_ids and the four token arrays of a group, trajectories end to end."""
    lengths = [t.num_tokens for t in fields.trajectories]
    if not lengths:
        raise refuse("trajectories", [], f"group {group.ordinal} is empty")
    arrays: list[tuple[str, np.ndarray]] = [("prompt_ids", group.prompt_ids)]
    for name, _ in _TOKEN_ARRAYS:
        parts = [getattr(trajectory, name) for trajectory in group.trajectories]
        if [len(part) for part in parts] != lengths:
            rule = f"group {group.ordinal} declares {lengths} tokens"
            raise refuse(f"{name} lengths", [len(part) for part in parts], rule)
        arrays.append((name, _end_to_end(parts)))
    return arrays


def _end_to_end(parts: Sequence[np.ndarray]) -> np.ndarray:
    """One array of all parts. No copy of neighbours in memory, as the parts of a decoded group are."""
    whole = parts[0].base
    if not (isinstance(whole, np.ndarray) and whole.ndim == 1 and whole.flags.c_contiguous):
        return np.concatenate(parts)
    start = address = parts[0].__array_interface__["data"][0]
    for part in parts:
        if part.base is not whole or part.dtype != whole.dtype or not part.flags.c_contiguous:
            return np.concatenate(parts)
        if len(part) and part.__array_interface__["data"][0] != address:
            return np.concatenate(parts)
        address += part.nbytes
    first = (start - whole.__array_interface__["data"][0]) // whole.itemsize
    return whole[first : first + (address - start) // whole.itemsize]
