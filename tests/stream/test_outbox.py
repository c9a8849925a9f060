"""The outbox: holds every group until it is acknowledged, and counts its bytes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.stream.outbox import Outbox, group_bytes
from asyncrl.types import Status, Trajectory, TrajectoryGroup


def group(
    ordinal: int, num_tokens: int = 10, redraw: int = 0, text: str = "", detail: str = ""
) -> TrajectoryGroup:
    t = Trajectory(
        np.zeros(num_tokens, np.int32),
        np.ones(num_tokens, np.uint8),
        np.zeros(num_tokens, np.float32),
        np.zeros(num_tokens, np.int32),
        1.0,
        Status.SCORED,
        "stop",
        text,
        detail,
    )
    return TrajectoryGroup(ordinal, redraw, np.zeros(4, np.int32), [t, t])


def test_the_bytes_of_a_group_are_those_of_its_arrays_texts_and_details() -> None:
    # Mutation caught: the prompt counted for each trajectory; a character counted as a byte; no details.
    assert group_bytes(group(0, 10, text="a\u00e9", detail="\u00e9")) == 4 * 4 + 2 * (13 * 10 + 3 + 2)


def test_an_acknowledged_group_is_forgotten_once_and_another_not_at_all() -> None:
    outbox = Outbox(10_000)
    for ordinal in (5, 3, 9, 1):
        outbox.add(group(ordinal))
    assert outbox.acknowledge([(3, 0), (9, 1), (77, 0)]) == 1
    assert len(outbox) == 3
    assert outbox.acknowledge([(3, 0)]) == 0
    assert outbox.num_bytes == 3 * group_bytes(group(0))


def test_a_group_finished_twice_is_held_once() -> None:
    outbox = Outbox(10_000)
    outbox.add(group(1, 10))
    outbox.add(group(1, 20))
    outbox.add(group(1, 20, redraw=1))
    assert len(outbox) == 2
    assert outbox.num_bytes == 2 * group_bytes(group(1, 20))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 30)), max_size=30))
def test_bytes_are_always_those_of_the_groups_held(steps: list[tuple[bool, int, int]]) -> None:
    # Mutation caught: acknowledge subtracting for groups that were not held.
    outbox, held = Outbox(1000), dict[int, TrajectoryGroup]()
    for adds, ordinal, num_tokens in steps:
        if adds:
            held[ordinal] = group(ordinal, num_tokens)
            outbox.add(held[ordinal])
        else:
            assert outbox.acknowledge([(ordinal, 0)]) == (held.pop(ordinal, None) is not None)
        assert (len(outbox), outbox.num_bytes) == (len(held), sum(map(group_bytes, held.values())))


def test_a_full_outbox_has_room_again_once_enough_is_acknowledged() -> None:
    # Mutation caught: the bound not looked at in acknowledge, or `<=` instead of `<`.
    async def run() -> None:
        size = group_bytes(group(0))
        outbox = Outbox(2 * size)
        outbox.add(group(0))
        await outbox.wait_for_room(1.0)
        outbox.add(group(1))
        outbox.add(group(2))
        waiting = asyncio.create_task(outbox.wait_for_room(10.0))
        await asyncio.sleep(0)
        outbox.acknowledge([(0, 0)])
        await asyncio.sleep(0.01)
        assert not waiting.done()  # exactly at the bound is full
        outbox.acknowledge([(1, 0)])
        await waiting

    asyncio.run(run())


def test_waiting_for_room_ends_at_its_deadline_with_the_figures() -> None:
    async def run() -> None:
        outbox = Outbox(100)
        outbox.add(group(0))
        with pytest.raises(TimeoutError, match=r"1 groups of 276 bytes \(bound 100\) .* 0\.01 s"):
            await outbox.wait_for_room(0.01)
        assert outbox.acknowledge([(0, 0)]) == 1
        await outbox.wait_for_room(0.01)

    asyncio.run(run())
