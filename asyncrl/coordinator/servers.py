"""The rollout servers as the coordinator sees them: who is there, at which version, alive or lost.

No I/O: the coordinator feeds it messages and times, and asks it whom to lease to and whom to give up.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config import TimeoutsConfig
from asyncrl.stream.messages import Heartbeat, ServerHello


@dataclass(slots=True)
class ServerState:
    """One connected rollout server."""

    peer: bytes
    name: str
    """What it calls itself in every header: `rollout-server-0` where `asyncrl train` started it."""
    max_groups_in_flight: int
    last_heard_s: float
    last_step_s: float
    """When its engine's step counter last advanced, or what it is doing last changed."""
    num_steps: int = 0
    state: str = "idle"
    is_connected: bool = True
    """False once a message to it found nobody."""
    version: int | None = None
    """Last version it echoed as committed; None before its cold sync."""
    offered: int | None = None
    """Newest version that it was offered."""
    num_refused: int = 0
    """Messages of it that broke the schema since its last good group."""
    num_leases: int = 0
    num_eval_leases: int = 0
    """Prompts of evaluations that it works on: besides `num_leases`, which pacing and credits count."""
    leased_s: float = 0.0
    """Time since it joined during which it held a lease."""
    lease_clock_s: float = 0.0
    """When leased_s was last brought up to date."""
    joined_s: float = 0.0

    @property
    def is_leased(self) -> bool:
        return self.num_leases > 0 or self.num_eval_leases > 0

    def serves(self, version: int) -> bool:
        """Whether its engine has this version, and will not leave it by itself: it was offered no newer one."""
        return self.version == self.offered == version

    def count_leases(self, num_leases: int, now_s: float, *, num_eval_leases: int = 0) -> None:
        """Records how many leases it holds from now on."""
        if self.is_leased:
            self.leased_s += now_s - self.lease_clock_s
        else:
            self.last_step_s = now_s  # its engine had nothing to do until now
        self.lease_clock_s = now_s
        self.num_leases = num_leases
        self.num_eval_leases = num_eval_leases


class Servers:
    """The registry of connected rollout servers."""

    def __init__(self, timeouts: TimeoutsConfig, group_bytes: int) -> None:
        """`group_bytes`: the most that the arrays of one group take; turns byte credits into groups."""
        self._timeouts = timeouts
        self._group_bytes = group_bytes
        self._states: dict[bytes, ServerState] = {}
        self._departed_s = 0.0, 0.0
        self._reported_s = 0.0, 0.0
        self.empty_since_s = 0.0
        """When the last server left; 0 before one has come."""

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._states

    def __getitem__(self, peer: bytes) -> ServerState:
        return self._states[peer]

    def all(self) -> list[ServerState]:
        return list(self._states.values())

    def join(self, peer: bytes, name: str, hello: ServerHello, now_s: float) -> ServerState:
        state = ServerState(
            peer,
            name,
            max(1, min(hello.max_groups_in_flight, hello.max_unacknowledged_bytes // self._group_bytes)),
            last_heard_s=now_s,
            last_step_s=now_s,
            lease_clock_s=now_s,
            joined_s=now_s,
        )
        self._states[peer] = state
        return state

    def leave(self, peer: bytes, now_s: float) -> ServerState:
        state = self._states.pop(peer)
        state.count_leases(0, now_s)
        leased_s, total_s = self._departed_s
        self._departed_s = leased_s + state.leased_s, total_s + now_s - state.joined_s
        if not self._states:
            self.empty_since_s = now_s
        return state

    def heartbeat(self, peer: bytes, heartbeat: Heartbeat, now_s: float) -> None:
        state = self._states[peer]
        moved = heartbeat.num_steps != state.num_steps or heartbeat.state != state.state
        if moved or heartbeat.state == "idle":
            state.last_step_s = now_s
        state.num_steps = heartbeat.num_steps
        state.state = heartbeat.state

    def next_to_lease(self) -> list[ServerState]:
        """Servers with a committed version and a free credit, the least busy first."""
        ready = [s for s in self._states.values() if s.version is not None and s.is_connected]
        free = [s for s in ready if s.num_leases < s.max_groups_in_flight]
        return sorted(free, key=lambda s: (s.num_leases, s.peer))

    def silent(self, now_s: float) -> list[ServerState]:
        """Servers not heard of for `timeouts.heartbeat_s`, or that a message did not find any more."""
        deadline_s = now_s - self._timeouts.heartbeat_s
        return [s for s in self._states.values() if s.last_heard_s < deadline_s or not s.is_connected]

    def stalled(self, now_s: float) -> list[ServerState]:
        """Servers that hold leases and stand still past the deadline of what they say they are doing."""
        deadlines_s = {
            "generating": self._timeouts.lease_s,
            "rewarding": self._timeouts.lease_s + self._timeouts.reward_s,
            "applying": self._timeouts.sync_s,
            "paused": self._timeouts.sync_s,
        }
        return [
            s
            for s in self._states.values()
            if s.is_leased and now_s - s.last_step_s > deadlines_s.get(s.state, self._timeouts.lease_s)
        ]

    def idle_share(self, now_s: float) -> float:
        """Share of the servers' time, since this was last asked, in which they held no lease."""
        leased_s, total_s = self._departed_s
        for state in self._states.values():
            state.count_leases(state.num_leases, now_s, num_eval_leases=state.num_eval_leases)
            leased_s += state.leased_s
            total_s += now_s - state.joined_s
        before_leased_s, before_total_s = self._reported_s
        self._reported_s = leased_s, total_s
        elapsed_s = total_s - before_total_s
        return 1.0 - (leased_s - before_leased_s) / elapsed_s if elapsed_s > 0 else 0.0
