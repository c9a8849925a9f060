"""The codec: what goes in comes out bit for bit, and nothing that breaks a rule comes out at all."""

from __future__ import annotations

import ast
import contextlib
import io
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncrl.stream
from asyncrl.errors import WireError
from asyncrl.stream.codec import WIRE_VERSION, Frame, Limits, Received, decode, encode, group_fields
from asyncrl.stream.envelope import MAX_SENDERS, Envelope, SequenceCheck, SequenceGap
from asyncrl.stream.messages import (
    Acknowledged,
    AnyMessage,
    Batch,
    Bye,
    Failed,
    GroupFinished,
    Header,
    Heartbeat,
    Lease,
    RankHello,
    ServerHello,
    StepReport,
    Stop,
    VersionCommitted,
    VersionRefused,
    WeightsOffer,
)
from asyncrl.types import Int32, Plan, Span, Status, Trajectory, TrajectoryGroup

VOCAB_SIZE, GROUP_SIZE, MAX_TOKENS, NEWEST = 100, 2, 8, 5
LIMITS = Limits(
    vocab_size=VOCAB_SIZE,
    group_size=GROUP_SIZE,
    max_prompt_tokens=16,
    max_completion_tokens=MAX_TOKENS,
    newest_version=NEWEST,
    run="r-1",
    incarnation="i-1",
)
SENDER = "server-a"


def trajectory(token_ids: list[int], reward: float | None = 1.0, **changes: Any) -> Trajectory:
    n = len(token_ids)
    made = Trajectory(
        token_ids=np.array(token_ids, np.int32),
        loss_mask=np.ones(n, np.uint8),
        rollout_logprobs=np.full(n, -0.5, np.float32),
        policy_versions=np.full(n, 3, np.int32),
        reward=reward,
        status=Status.SCORED if reward is not None else Status.REWARD_FAILED,
        finish_reason="stop",
        text="four",
    )
    return replace(made, **changes)


def two_trajectories(ordinal: int = 7) -> TrajectoryGroup:
    return TrajectoryGroup(
        ordinal, 0, np.array([5, 6, 7], np.int32), [trajectory([1, 2, 3]), trajectory([4], None)]
    )


def header(body: AnyMessage, **changes: Any) -> Header:
    return msgspec.structs.replace(Header(WIRE_VERSION, "r-1", "i-1", SENDER, 3, body), **changes)


def finished(group: TrajectoryGroup) -> list[Frame]:
    return encode(header(GroupFinished(group_fields(group))), [group])


def batch(*groups: TrajectoryGroup, index: int = 3) -> Batch:
    of_rank = [[i] for i in range(len(groups))] or [[]]
    plan = Plan(index, [g.ordinal for g in groups], [], [], [[of_rank]], 1)
    return Batch(plan, 0, [group_fields(g) for g in groups])


def same_group(a: TrajectoryGroup, b: TrajectoryGroup) -> bool:
    def record(group: TrajectoryGroup) -> tuple[Any, ...]:
        fields: list[Any] = []
        for t in group.trajectories:
            fields += [t.reward, t.status, t.finish_reason, t.text, t.detail, t.reward_components]
            for array in (t.token_ids, t.loss_mask, t.rollout_logprobs, t.policy_versions):
                fields += [array.dtype, array.tobytes()]
        return group.ordinal, group.redraw, group.prompt_ids.tobytes(), fields, group.spans

    return record(a) == record(b)


# Arbitrary good groups -------------------------------------------------------------------------------

logprob_values = st.one_of(
    st.sampled_from([0.0, -0.0, -1e-45, -1.1754942e-38, -3.4028235e38, -1e-30]),
    st.floats(max_value=0.0, allow_nan=False, allow_infinity=False, width=32),
)


components = st.dictionaries(st.text(max_size=4), st.floats(-1e30, 1e30), max_size=3)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    status = draw(st.sampled_from(Status))
    n = draw(st.integers(int(status is Status.SCORED), MAX_TOKENS))

    def array(values: st.SearchStrategy[Any], dtype: type) -> np.ndarray:
        return np.array(draw(st.lists(values, min_size=n, max_size=n)), dtype)

    mask = array(st.integers(0, 1), np.uint8)
    versions = array(st.integers(0, NEWEST), np.int32)
    versions[(mask == 0) & array(st.booleans(), np.bool_)] = -1
    return Trajectory(
        token_ids=array(st.integers(0, VOCAB_SIZE - 1), np.int32),
        loss_mask=mask,
        rollout_logprobs=array(logprob_values, np.float32),
        policy_versions=versions,
        reward=draw(st.floats(-1e30, 1e30)) if status is Status.SCORED else None,
        status=status,
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        text=draw(st.text(max_size=8)),
        detail="" if status is Status.SCORED else draw(st.text(max_size=8)),
        reward_components=draw(components) if status is Status.SCORED else {},
    )


spans = st.builds(
    Span,
    st.text(max_size=4),
    st.floats(allow_nan=False),
    st.floats(allow_nan=False),
    st.dictionaries(st.text(max_size=3), st.one_of(st.text(max_size=3), st.integers(-(2**63), 2**63))),
)
groups = st.builds(
    TrajectoryGroup,
    ordinal=st.integers(0, 2**63),
    redraw=st.integers(0, 9),
    prompt_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=16).map(
        lambda ids: np.array(ids, np.int32)
    ),
    trajectories=st.lists(trajectories(), min_size=GROUP_SIZE, max_size=GROUP_SIZE),
    spans=st.lists(spans, max_size=2),
)


@settings(max_examples=60, deadline=None)
@given(groups)
def test_a_group_comes_out_bit_for_bit(group: TrajectoryGroup) -> None:
    # Mutation caught: versions and ids swapped in _group; detail left out of group_fields; -0.0 normalised.
    received = decode([bytes(frame) for frame in finished(group)], LIMITS, peer=SENDER.encode())
    assert same_group(received.groups[0], group)
    assert received.header.sequence == 3


@settings(max_examples=40, deadline=None)
@given(st.lists(groups, max_size=3))
def test_a_batch_comes_out_bit_for_bit_and_so_does_what_is_forwarded_of_it(
    sent: list[TrajectoryGroup],
) -> None:
    # Mutation caught: the stride of 5 frames a group; _end_to_end taking the wrong part of the whole array.
    body = batch(*sent, index=NEWEST)
    once = decode([bytes(f) for f in encode(header(body), sent)], LIMITS).groups
    twice = decode([bytes(f) for f in encode(header(body), once)], LIMITS).groups
    assert len(twice) == len(sent)
    assert all(same_group(a, b) for a, b in zip(twice, sent, strict=True))


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_a_lease_carries_its_prompt_and_its_row(row: dict[str, Any]) -> None:
    prompt_ids = np.array([1, 99, 0], np.int32)
    received = decode(encode(header(Lease(4, 1, [0, 2**63 - 1], row)), (), prompt_ids), LIMITS)
    assert received.prompt_ids is not None
    assert received.prompt_ids.tolist() == [1, 99, 0]
    assert received.body == Lease(4, 1, [0, 2**63 - 1], row)


@pytest.mark.parametrize(
    "body",
    [
        ServerHello("digest", 4, 1 << 20),
        Heartbeat([1, 2], 99, "paused"),
        Acknowledged([(1, 0), (2, 1)]),
        WeightsOffer(2, "/dev/shm/x", b'{"a": 1}'),
        VersionCommitted(5, [Span("apply", 1.5, 2.5, {"mb": 3, "x": 0.5, "how": "shm"})]),
        VersionRefused(5, "no space left"),
        RankHello("digest", 1, 2),
        Failed("engine died", "Traceback ..."),
        Stop(),
        Bye(),
    ],
)
def test_messages_without_arrays_come_out_as_they_went_in(body: AnyMessage) -> None:
    assert decode(encode(header(body)), LIMITS).body == body


def test_an_integer_passes_for_a_float() -> None:
    # Mutation caught: only the first of the two comparisons in _decode_header.
    frames = encode(header(StepReport(3, {"actor/lr": 0, "x": 0.5}, [Span("step", 1, 2)])))
    body = decode(frames, LIMITS).body
    assert body == StepReport(3, {"actor/lr": 0.0, "x": 0.5}, [Span("step", 1.0, 2.0)])


# Zero copy -------------------------------------------------------------------------------------------


def test_decoded_arrays_are_read_only_views_of_the_frames() -> None:
    # Mutation caught: np.array(...) instead of np.frombuffer.
    frames: list[Frame] = [memoryview(bytearray(frame)) for frame in finished(two_trajectories())]
    group = decode(frames, LIMITS).groups[0]
    for index, name in enumerate(("token_ids", "loss_mask", "rollout_logprobs", "policy_versions"), 2):
        memory = np.frombuffer(frames[index], np.uint8)
        for t in group.trajectories:
            assert np.shares_memory(getattr(t, name), memory)
            assert not getattr(t, name).flags.writeable
    assert np.shares_memory(group.prompt_ids, np.frombuffer(frames[1], np.uint8))


def test_encoding_sends_the_arrays_own_memory_where_they_lie_end_to_end() -> None:
    # Mutation caught: np.concatenate without looking whether the parts are neighbours; the wrong stretch sent.
    received = decode([bytes(frame) for frame in finished(two_trajectories())], LIMITS).groups[0]
    again = finished(received)
    for index, name in enumerate(("token_ids", "loss_mask", "rollout_logprobs", "policy_versions"), 2):
        memory = np.frombuffer(again[index], np.uint8)
        assert all(np.shares_memory(getattr(t, name), memory) for t in received.trajectories)
    whole = np.arange(9, dtype=np.int32)
    parts = {
        "later": [whole[2:4], whole[4:7]],
        "unordered": [whole[4:6], whole[2:4]],
        "gap": [whole[0:2], whole[3:4]],
        "strided": [whole[0:8:2], whole[8:9]],
    }
    for how, views in parts.items():
        group = two_trajectories()
        group.trajectories = [replace(trajectory(view.tolist()), token_ids=view) for view in views]
        sent = np.frombuffer(finished(group)[2], np.int32)
        assert sent.tolist() == np.concatenate(views).tolist(), how
        assert np.shares_memory(sent, whole) is (how == "later")


# Refusals: a change of one good message for each rule ------------------------------------------------------


def changed(group: TrajectoryGroup, index: int, **changes: Any) -> TrajectoryGroup:
    parts = list(group.trajectories)
    parts[index] = replace(parts[index], **changes)
    return replace(group, trajectories=parts)


def with_array(name: str, values: list[float], dtype: type) -> list[Frame]:
    return finished(changed(two_trajectories(), 0, **{name: np.array(values, dtype)}))


def with_header(**changes: Any) -> list[Frame]:
    group = two_trajectories()
    return encode(header(GroupFinished(group_fields(group)), **changes), [group])


def with_raw(path: str, value: Any) -> list[Frame]:
    """A good message whose header has one value changed that the types would not let through."""
    frames = finished(two_trajectories())
    raw = msgspec.msgpack.decode(frames[0])
    *steps, last = path.split(".")
    inner = raw
    for step in steps:
        inner = inner[int(step)] if isinstance(inner, list) else inner[step]
    inner[int(last) if isinstance(inner, list) else last] = value
    return [msgspec.msgpack.encode(raw), *frames[1:]]


def with_frames(change: str) -> list[Frame]:
    frames = finished(two_trajectories())
    if change == "missing":
        return frames[:-1]
    if change == "extra":
        return [*frames, b""]
    if change == "short":
        return [*frames[:2], bytes(frames[2])[:-4], *frames[3:]]
    return [bytes(frames[0]) + b"\xc0", *frames[1:]]


def with_duplicate_key() -> list[Frame]:
    frames = finished(two_trajectories())
    raw = bytes(frames[0])
    assert raw[0] == 0x87  # a map of 7
    return [b"\x88" + raw[1:] + msgspec.msgpack.encode("wire") + msgspec.msgpack.encode(1), *frames[1:]]


def with_wide_integer() -> list[Frame]:
    frames = finished(two_trajectories())
    raw = bytes(frames[0])
    assert b"\xa7ordinal\x07" in raw
    return [raw.replace(b"\xa7ordinal\x07", b"\xa7ordinal\xcd\x00\x07"), *frames[1:]]


def lease(
    seeds: list[int] | None = None, row: Any = None, prompt_ids: Int32 | None = None, num_greedy: int = 0
) -> list[Frame]:
    ids = np.array([1], np.int32) if prompt_ids is None else prompt_ids
    return encode(header(Lease(0, 0, seeds or [1, 2], row or {}, num_greedy)), (), ids)


def a_batch(**changes: Any) -> list[Frame]:
    group = two_trajectories()
    body = msgspec.structs.replace(batch(group), **changes)
    return encode(header(body), [group])


def plan(index: int, ordinals: list[int], *minibatches: list[list[list[int]]], num_epochs: int = 1) -> Plan:
    return Plan(index, ordinals, [], [], list(minibatches), num_epochs)


def a_group(trajectories: list[Trajectory]) -> list[Frame]:
    return finished(replace(two_trajectories(), trajectories=trajectories))


def scored(**changes: Any) -> list[Frame]:
    return finished(changed(two_trajectories(), 0, **changes))


T0 = "body.group.trajectories[0]"
REFUSED: dict[str, tuple[Any, str, str]] = {
    # rule: (how to make the frames, field, value)
    "no frame": (list, "frames", "0"),
    "wire version": (lambda: with_header(wire=1), "wire", "1"),
    "wire version of another schema": (lambda: with_raw("wire", "9"), "wire", "'9'"),
    "run": (lambda: with_header(run="r-2"), "run", "'r-2'"),
    "incarnation": (lambda: with_header(incarnation="i-0"), "incarnation", "'i-0'"),
    "no incarnation after Hello": (lambda: with_header(incarnation=""), "incarnation", "''"),
    "no run after Hello": (lambda: with_header(run=""), "run", "''"),
    "another sender": (lambda: with_header(sender="server-b"), "sender", "'server-b'"),
    "negative sequence": (lambda: with_header(sequence=-1), "sequence", "-1"),
    "unknown kind": (lambda: with_raw("body.kind", "Shutdown"), "body.kind", "'Shutdown'"),
    "unknown field": (lambda: with_raw("body.group.extra", 4), "body.group", "`extra`"),
    "wrong type": (lambda: with_raw("body.group.ordinal", "7"), "body.group.ordinal", "'7'"),
    "extension type": (
        lambda: with_raw("body.group.ordinal", msgspec.msgpack.Ext(5, b"abc")),
        "body.group.ordinal",
        "Ext",
    ),
    "unknown status": (lambda: with_raw("body.group.trajectories.1.status", "fine"), ".status", "'fine'"),
    "duplicate key": (with_duplicate_key, "header", "repeats a key"),
    "odd encoding": (with_wide_integer, "header", "not encoded as"),
    "trailing bytes": (lambda: with_frames("trailing"), "header", "trailing"),
    "missing frame": (lambda: with_frames("missing"), "frames", "4"),
    "extra frame": (lambda: with_frames("extra"), "frames", "6"),
    "short frame": (lambda: with_frames("short"), "frame 2 bytes", "12"),
    "wrong dtype": (lambda: with_raw("arrays.1.0", "float64"), "arrays", "'float64'"),
    "declared length": (lambda: with_raw("arrays.1.1", 5), "frame 2 bytes", "16"),
    "negative length": (lambda: with_raw("arrays.1.1", -4), "frame 2 bytes", "16"),
    "num_tokens and arrays": (
        lambda: with_raw("body.group.trajectories.1.num_tokens", 2),
        "body.group.token_ids length",
        "4",
    ),
    "negative num_tokens": (
        lambda: with_raw("body.group.trajectories.1.num_tokens", -1),
        "[1].num_tokens",
        "-1",
    ),
    "too many tokens": (lambda: a_group([trajectory([1] * 9)] * 2), f"{T0}.num_tokens", "9"),
    "scored but empty": (lambda: a_group([trajectory([])] * 2), f"{T0}.num_tokens", "0"),
    "negative id": (lambda: with_array("token_ids", [1, -7, 3], np.int32), f"{T0}.token_ids[1]", "-7"),
    "id outside": (lambda: with_array("token_ids", [1, 2, 100], np.int32), f"{T0}.token_ids[2]", "100"),
    "mask": (lambda: with_array("loss_mask", [0, 1, 2], np.uint8), f"{T0}.loss_mask[2]", "2"),
    "positive logprob": (
        lambda: with_array("rollout_logprobs", [-1, 1e-45, -1], np.float32),
        f"{T0}.rollout_logprobs[1]",
        "1.4",
    ),
    "NaN logprob": (
        lambda: with_array("rollout_logprobs", [-1, -1, np.nan], np.float32),
        f"{T0}.rollout_logprobs[2]",
        "nan",
    ),
    "-inf logprob": (
        lambda: with_array("rollout_logprobs", [-np.inf, -1, -1], np.float32),
        f"{T0}.rollout_logprobs[0]",
        "-inf",
    ),
    "future version": (
        lambda: with_array("policy_versions", [3, 6, 3], np.int32),
        f"{T0}.policy_versions[1]",
        "6",
    ),
    "version -1 of a trained token": (
        lambda: with_array("policy_versions", [3, 3, -1], np.int32),
        f"{T0}.policy_versions[2]",
        "-1",
    ),
    "version -2": (
        lambda: finished(
            changed(
                two_trajectories(),
                0,
                policy_versions=np.array([3, 3, -2], np.int32),
                loss_mask=np.zeros(3, np.uint8),
            )
        ),
        f"{T0}.policy_versions[2]",
        "-2",
    ),
    "infinite reward": (lambda: scored(reward=float("inf")), f"{T0}.reward", "inf"),
    "NaN reward": (lambda: scored(reward=float("nan")), f"{T0}.reward", "nan"),
    "huge reward": (lambda: scored(reward=-2e30), f"{T0}.reward", "-2e+30"),
    "scored without reward": (lambda: scored(reward=None), f"{T0}.reward", "None"),
    "reward without score": (lambda: scored(status=Status.ABORTED), f"{T0}.reward", "1.0"),
    "detail of a scored one": (lambda: scored(detail="why"), f"{T0}.detail", "'why'"),
    "NaN component": (
        lambda: scored(reward_components={"a": float("nan")}),
        f"{T0}.reward_components.a",
        "nan",
    ),
    "components without a reward": (
        lambda: finished(changed(two_trajectories(), 1, reward_components={"a": 1.0})),
        "body.group.trajectories[1].reward_components",
        "{'a': 1.0}",
    ),
    "long detail": (
        lambda: finished(changed(two_trajectories(), 1, detail="x" * 2001)),
        "body.group.trajectories[1].detail length",
        "2001",
    ),
    "group size": (lambda: a_group([trajectory([1])]), "body.group.trajectories length", "1"),
    "negative ordinal": (lambda: finished(two_trajectories(-1)), "body.group.(ordinal, redraw)", "(-1, 0)"),
    "empty prompt": (
        lambda: finished(replace(two_trajectories(), prompt_ids=np.zeros(0, np.int32))),
        "body.group.prompt_ids length",
        "0",
    ),
    "long prompt": (
        lambda: finished(replace(two_trajectories(), prompt_ids=np.zeros(17, np.int32))),
        "body.group.prompt_ids length",
        "17",
    ),
    "prompt id": (
        lambda: finished(replace(two_trajectories(), prompt_ids=np.array([1, 101], np.int32))),
        "body.group.prompt_ids[1]",
        "101",
    ),
    "second trajectory": (
        lambda: finished(changed(two_trajectories(), 1, token_ids=np.array([444], np.int32))),
        "body.group.trajectories[1].token_ids[0]",
        "444",
    ),
    "greedy requests": (lambda: lease(num_greedy=-1), "body.num_greedy", "-1"),
    "only greedy requests": (lambda: lease(num_greedy=2), "body.num_greedy", "2"),
    "lease seeds": (lambda: lease(seeds=[1]), "body.seeds length", "1"),
    "lease seed": (lambda: lease(seeds=[1, 2**63]), "body.seeds[1]", str(2**63)),
    "lease prompt": (lambda: lease(prompt_ids=np.array([-1], np.int32)), "prompt_ids[0]", "-1"),
    "lease row bytes": (lambda: lease(row={"a": [b"x"]}), "body.row.a[0]", "b'x'"),
    "lease row extension": (lambda: lease(row={"a": msgspec.msgpack.Ext(5, b"x")}), "body.row.a", "Ext"),
    "lease row key": (lambda: lease(row={"a": {1: 2}}), "body.row.a key", "1"),
    "committed future": (lambda: encode(header(VersionCommitted(6))), "body.version", "6"),
    "refused future": (lambda: encode(header(VersionRefused(6, "x"))), "body.version", "6"),
    "refused negative": (lambda: encode(header(VersionRefused(-1, "x"))), "body.version", "-1"),
    "heartbeat state": (lambda: encode(header(Heartbeat([], 0, "asleep"))), "body.state", "'asleep'"),
    "no credits": (lambda: encode(header(ServerHello("", 0, 5))), "body.max_groups_in_flight", "0"),
    "rank": (lambda: encode(header(RankHello("", 2, 2))), "body.rank", "2"),
    "batch rank": (lambda: a_batch(rank=1), "body.rank", "1"),
    "batch position": (lambda: a_batch(plan=plan(3, [7], [[[1]]])), "body.plan.minibatches", "[1]"),
    "batch position twice": (
        lambda: a_batch(plan=plan(3, [7], [[[0]]], [[[0]]])),
        "body.plan.minibatches",
        "[0, 0]",
    ),
    "batch position missing": (lambda: a_batch(plan=plan(3, [7], [[[]]])), "body.plan.minibatches", "[]"),
    "batch without mini-batches": (lambda: a_batch(plan=plan(3, [7])), "body.plan.minibatches", "[]"),
    "batch with unequal ranks": (
        lambda: a_batch(plan=plan(3, [7], [[[0]], [[], []]])),
        "body.plan.minibatches[0] lengths",
        "[1, 2]",
    ),
    "batch without microbatches": (
        lambda: a_batch(plan=plan(3, [7], [[[0]]], [[]])),
        "body.plan.minibatches[1] lengths",
        "[0]",
    ),
    "batch with fewer ranks": (
        lambda: a_batch(plan=plan(3, [7], [[[0]]], [[[]], [[]]])),
        "body.plan.minibatches[1] lengths",
        "[1, 1]",
    ),
    "batch epochs": (lambda: a_batch(plan=plan(3, [7], [[[0]]], num_epochs=0)), "body.plan.num_epochs", "0"),
    "batch groups": (lambda: a_batch(plan=plan(3, [8], [[[0]]])), "body.groups", "[7]"),
    "batch index": (lambda: a_batch(plan=plan(-1, [7], [[[0]]])), "body.plan.index", "-1"),
    "batch of older version": (
        lambda: a_batch(plan=plan(2, [7], [[[0]]])),
        "body.groups[0].trajectories[0].policy_versions[0]",
        "3",
    ),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_a_broken_rule_is_refused_with_field_value_and_sender(rule: str) -> None:
    # Mutation caught, one a case: the check of that rule left out.
    make, field, value = REFUSED[rule]
    with pytest.raises(WireError) as caught:
        decode([bytes(frame) for frame in make()], LIMITS, peer=SENDER.encode())
    message = str(caught.value)
    assert field in message.split(": ")[0]
    assert value in message
    assert SENDER in message


def test_the_message_that_the_refusals_change_is_itself_accepted() -> None:
    for frames in (finished(two_trajectories()), lease(), a_batch()):
        assert isinstance(decode(frames, LIMITS, peer=SENDER.encode()), Received)


def test_the_first_messages_may_leave_run_and_incarnation_empty() -> None:
    for body in (ServerHello("d", 1, 1), RankHello("d", 0, 1), Failed("x", ""), Bye()):
        assert decode(encode(header(body, run="", incarnation="")), LIMITS).body == body


def test_a_masked_token_may_have_no_version() -> None:
    frames = finished(
        changed(
            two_trajectories(),
            0,
            policy_versions=np.array([-1, 3, 3], np.int32),
            loss_mask=np.array([0, 1, 1], np.uint8),
        )
    )
    assert decode(frames, LIMITS).groups[0].trajectories[0].policy_versions.tolist() == [-1, 3, 3]


def test_a_sender_that_cannot_be_read_is_named_by_its_socket() -> None:
    with pytest.raises(WireError, match=r"from '\\\\xffpeer'"):
        decode([b"\x00"], LIMITS, peer=b"\xffpeer")


def test_the_sender_refuses_arrays_that_do_not_fit() -> None:
    group = two_trajectories()
    body = GroupFinished(group_fields(group))
    wide = changed(group, 0, token_ids=np.array([1, 2, 3]))
    ragged = changed(group, 0, loss_mask=np.ones(2, np.uint8))
    for bad, what in ((wide, "token_ids is '1-d int64'"), (ragged, r"loss_mask lengths is \[2, 1\]")):
        with pytest.raises(WireError, match=what):
            encode(header(body), [bad])
    with pytest.raises(WireError, match=r"\(groups, has prompt_ids\) is \(0, False\)"):
        encode(header(body))
    with pytest.raises(WireError, match="empty"):
        finished(replace(group, trajectories=[]))


# Hostile bytes ----------------------------------------------------------------------------------------


def accepts_or_refuses(frames: list[bytes]) -> None:
    with contextlib.suppress(WireError):
        decode(frames, LIMITS, peer=b"fuzz")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=7))
def test_random_bytes_raise_nothing_but_wire_errors(frames: list[bytes]) -> None:
    accepts_or_refuses(frames)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_flipped_and_truncated_frames_raise_nothing_but_wire_errors(data: st.DataObject) -> None:
    makers = [lambda: finished(two_trajectories()), lease, a_batch]
    frames = [bytearray(f) for f in data.draw(st.sampled_from(makers))()]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = frames[data.draw(st.integers(0, len(frames) - 1))]
        if frame and data.draw(st.booleans()):
            frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        else:
            del frame[data.draw(st.integers(0, len(frame))) :]
    accepts_or_refuses([bytes(frame) for frame in frames])


def test_deep_nesting_is_refused() -> None:
    deep = b"\x91" * 100_000 + b"\xc0"
    raw = bytes(lease(row={"a": "Q"})[0]).replace(b"\xa1Q", deep)
    with pytest.raises(WireError):
        decode([raw, b"\x01\x00\x00\x00"], LIMITS)
    with pytest.raises(WireError):
        decode([deep], LIMITS)


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (open, (str(canary), "w"))

    payload = pickle.dumps(Payload())
    good = [bytes(f) for f in finished(two_trajectories())]
    for index in range(len(good)):
        for frames in ([*good[:index], payload, *good[index + 1 :]], [payload]):
            with pytest.raises(WireError):
                decode(frames, LIMITS)
    assert not canary.exists()
    pickle.load(io.BytesIO(payload)).close()
    assert canary.exists()  # the payload works where pickle is used


def test_no_module_of_the_stream_imports_or_calls_for_pickle() -> None:
    for path in Path(next(iter(asyncrl.stream.__path__))).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Attribute):
                names = [node.attr]
            forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "torch"}
            assert not {name.split(".")[0] for name in names} & (forbidden | {"send_pyobj", "recv_pyobj"}), (
                path
            )


# Envelope and sequence -----------------------------------------------------------------------------------


def test_an_envelope_counts_and_names_its_sender() -> None:
    envelope = Envelope(SENDER, max_message_bytes=1 << 20, run="r-1", incarnation="i-1")
    headers = [decode(envelope.seal(Bye()), LIMITS).header for _ in range(3)]
    assert [(h.sender, h.sequence, h.run, h.incarnation) for h in headers] == [
        (SENDER, n, "r-1", "i-1") for n in range(3)
    ]


def test_an_oversize_message_is_refused_by_its_sender_and_not_counted() -> None:
    # Mutation caught: next_sequence raised before the size is checked; only the header measured.
    group = two_trajectories()
    size = sum(len(f) for f in finished(group))
    body = GroupFinished(group_fields(group))
    tight = Envelope(SENDER, max_message_bytes=size - 1, run="r-1", incarnation="i-1")
    with pytest.raises(WireError, match=rf"GroupFinished of {size} bytes .* {size - 1}.*{SENDER}"):
        tight.seal(body, [group])
    assert tight.next_sequence == 0
    assert (
        len(Envelope(SENDER, max_message_bytes=size, run="r-1", incarnation="i-1").seal(body, [group])) == 6
    )


def test_a_gap_is_one_error_and_a_repetition_another() -> None:
    # Mutation caught: expected not moved behind a gap; a repetition taken for a new message.
    check = SequenceCheck()
    hello = ServerHello("d", 1, 1)
    check.check(header(hello, sequence=0))
    check.check(header(Bye(), sequence=1))
    with pytest.raises(SequenceGap, match=rf"gap: sequence is 5, expected 2: 3 messages .*{SENDER}"):
        check.check(header(Bye(), sequence=5))
    check.check(header(Bye(), sequence=6))
    with pytest.raises(WireError, match="sequence is 6: repeated, expected 7"):
        check.check(header(Bye(), sequence=6))
    check.check(header(Bye(), sequence=0, sender="other"))
    check.check(header(hello, sequence=0))
    check.check(header(Bye(), sequence=1))
    check.forget(SENDER)
    with pytest.raises(SequenceGap):
        check.check(header(Bye(), sequence=2))


def test_strangers_make_the_check_forget_only_who_was_silent_for_longest() -> None:
    # Mutation caught: no bound; the oldest sender dropped instead of the longest silent one.
    check = SequenceCheck()
    for sender in ("member", "silent"):
        check.check(header(Bye(), sequence=0, sender=sender))
    for n in range(MAX_SENDERS - 2):
        check.check(header(Bye(), sequence=0, sender=f"stranger-{n}"))
    check.check(header(Bye(), sequence=1, sender="member"))
    check.check(header(Bye(), sequence=0, sender="one more"))
    assert len(check._expected) == MAX_SENDERS
    check.check(header(Bye(), sequence=2, sender="member"))
    with pytest.raises(SequenceGap, match="sequence is 1, expected 0"):
        check.check(header(Bye(), sequence=1, sender="silent"))


def test_a_message_refused_for_its_arrays_still_counts_in_the_sequence() -> None:
    check = SequenceCheck()
    bad = changed(two_trajectories(), 0, token_ids=np.array([1, 2, 999], np.int32))
    frames = encode(header(GroupFinished(group_fields(bad)), sequence=0), [bad])
    with pytest.raises(WireError, match="999"):
        decode(frames, LIMITS, on_header=check.check)
    decode(encode(header(Bye(), sequence=1)), LIMITS, on_header=check.check)


# The documentation ---------------------------------------------------------------------------------


def test_the_frames_in_the_documentation_are_the_codec_s() -> None:
    page = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
    shown: list[bytes] = []
    for line in page.splitlines():
        if re.fullmatch(r"frame \d+ \d+ bytes", line):
            shown.append(b"")
        elif match := re.match(r"  [0-9a-f]{4}  ((?:[0-9a-f]{2} ?)+) ", line):
            shown[-1] += bytes.fromhex(match[1])

    def made(
        ids: list[int], logprobs: list[float], versions: list[int], reward: float, text: str
    ) -> Trajectory:
        return trajectory(
            ids,
            reward,
            rollout_logprobs=np.array(logprobs, np.float32),
            policy_versions=np.array(versions, np.int32),
            text=text,
        )

    group = TrajectoryGroup(
        7,
        0,
        np.array([5, 6], np.int32),
        [made([9, 2], [-0.5, -0.25], [3, 4], 1.0, "4"), made([8], [-1.0], [4], 0.0, "")],
    )
    envelope = Envelope(SENDER, max_message_bytes=1 << 20, run="demo", incarnation="i1")
    envelope.next_sequence = 12
    assert [bytes(f) for f in envelope.seal(GroupFinished(group_fields(group)), [group])] == shown
