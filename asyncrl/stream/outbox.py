"""The groups that a rollout server has finished and the coordinator has not acknowledged yet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from asyncrl.types import TrajectoryGroup


class Outbox:
    """Holds a group from its end until its Acknowledged: what the server may still have to answer for.

    Bounded in bytes by asking first: the server calls `wait_for_room` before it begins a lease. `add` itself
    never refuses, since a finished group is worth more than the bound.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Of all groups held, by `group_bytes`."""
        self._groups: dict[tuple[int, int], TrajectoryGroup] = {}
        self._room = asyncio.Event()
        self._room.set()

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: TrajectoryGroup) -> None:
        """Keeps a finished group. One that was finished before (its lease came back) replaces the old one."""
        key = group.ordinal, group.redraw
        if (old := self._groups.get(key)) is not None:
            self.num_bytes -= group_bytes(old)
        self._groups[key] = group
        self.num_bytes += group_bytes(group)
        self._update_room()

    def acknowledge(self, groups: Iterable[tuple[int, int]]) -> int:
        """Forgets these (ordinal, redraw), ignores unknown ones, and returns how many it held."""
        held = [group for key in groups if (group := self._groups.pop(key, None)) is not None]
        self.num_bytes -= sum(map(group_bytes, held))
        self._update_room()
        return len(held)

    async def wait_for_room(self, timeout_s: float) -> None:
        """Returns as soon as num_bytes < max_bytes. Raises TimeoutError after timeout_s."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._room.wait()
        except TimeoutError:
            raise TimeoutError(
                f"{len(self)} groups of {self.num_bytes} bytes (bound {self.max_bytes}) are not acknowledged "
                f"after {timeout_s:g} s; the coordinator does not take them in"
            ) from None

    def _update_room(self) -> None:
        if self.num_bytes < self.max_bytes:
            self._room.set()
        else:
            self._room.clear()


def group_bytes(group: TrajectoryGroup) -> int:
    """Bytes of a group's arrays, texts, details and reward components."""
    return group.prompt_ids.nbytes + sum(
        t.token_ids.nbytes
        + t.loss_mask.nbytes
        + t.rollout_logprobs.nbytes
        + t.policy_versions.nbytes
        + len(t.text.encode())
        + len(t.detail.encode())
        + sum(len(label.encode()) + 9 for label in t.reward_components)
        for t in group.trajectories
    )
