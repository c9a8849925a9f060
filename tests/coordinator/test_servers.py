"""Which servers are silent, which stand still, and what they may be leased."""

from __future__ import annotations

import pytest

from asyncrl.config import TimeoutsConfig
from asyncrl.coordinator.servers import Servers
from asyncrl.stream.messages import Heartbeat, ServerHello

LEASE_S, SYNC_S, REWARD_S, HEARTBEAT_S = 60.0, 300.0, 10.0, 30.0
PEER = b"server"


def registry(*, group_bytes: int = 100, max_bytes: int = 10_000, max_groups: int = 8) -> Servers:
    servers = Servers(
        TimeoutsConfig(lease_s=LEASE_S, sync_s=SYNC_S, reward_s=REWARD_S, heartbeat_s=HEARTBEAT_S),
        group_bytes,
    )
    servers.join(PEER, "server", ServerHello("d", max_groups, max_bytes), 0.0)
    return servers


@pytest.mark.parametrize(
    ("state", "deadline_s"),
    [("generating", LEASE_S), ("rewarding", LEASE_S + REWARD_S), ("applying", SYNC_S)],
)
def test_a_server_that_stands_still_is_stalled_after_the_deadline_of_its_state(state: str, deadline_s: float):
    # Mutations: one deadline for all; any state but generating excuses for ever.
    servers = registry()
    servers[PEER].count_leases(1, 0.0)
    servers.heartbeat(PEER, Heartbeat([0], 5, state), 0.0)
    servers.heartbeat(PEER, Heartbeat([0], 5, state), deadline_s)
    assert servers.stalled(deadline_s) == []
    assert servers.stalled(deadline_s + 1) == [servers[PEER]]


def test_a_step_of_the_engine_starts_the_deadline_anew():
    servers = registry()
    servers[PEER].count_leases(1, 0.0)
    servers.heartbeat(PEER, Heartbeat([0], 1, "generating"), 50.0)
    servers.heartbeat(PEER, Heartbeat([0], 2, "generating"), 100.0)
    assert servers.stalled(100.0 + LEASE_S) == []


def test_a_server_that_was_idle_for_long_is_not_stalled_at_its_first_lease():
    # Mutation: the deadline counted from its last step, before it had anything to do.
    servers = registry()
    servers.heartbeat(PEER, Heartbeat([], 5, "idle"), 0.0)
    servers[PEER].count_leases(1, 1000.0)
    assert servers.stalled(1001.0) == []
    assert servers.stalled(1000.0 + LEASE_S + 1) == [servers[PEER]]


def test_a_server_without_leases_is_never_stalled_but_may_be_silent():
    servers = registry()
    servers.heartbeat(PEER, Heartbeat([], 5, "idle"), 0.0)
    assert servers.stalled(1000.0) == []
    assert servers.silent(HEARTBEAT_S) == []
    assert servers.silent(HEARTBEAT_S + 1) == [servers[PEER]]


@pytest.mark.parametrize(("max_bytes", "credits"), [(10_000, 8), (350, 3), (50, 1)])
def test_byte_credits_bound_the_groups_in_flight(max_bytes: int, credits: int):
    # Mutation: only the credits in groups are read. One group always goes, or nothing ever would.
    assert registry(max_bytes=max_bytes)[PEER].max_groups_in_flight == credits


def test_idle_share_is_of_the_time_since_it_was_last_asked():
    # Mutation: the mean since the server joined.
    servers = registry()
    servers[PEER].count_leases(1, 10.0)
    assert servers.idle_share(20.0) == pytest.approx(0.5)
    assert servers.idle_share(30.0) == pytest.approx(0.0)
    servers[PEER].count_leases(0, 30.0)
    assert servers.idle_share(40.0) == pytest.approx(1.0)
