"""A discrete-event simulation of coordinator, rollout servers and learner that runs the staleness rules.

Time is virtual and counted in integer ticks, so a scenario always plays out the same. A group is one stretch
of tokens; the version of each is the one its server had committed at the tick that sampled it, kept as runs
(version, num_tokens). Length and failure of a group depend on its ordinal alone, as its seed does.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.coordinator.staleness import (
    FinishedGroup,
    Pacing,
    can_form_batch,
    can_lease,
    choose_batch,
)

Runs = tuple[tuple[int, int], ...]
"""(version, num_tokens) of consecutive tokens."""


@dataclass(frozen=True)
class Outage:
    at: int
    down_ticks: int
    result_still_comes: bool
    """The server is only cut off: its groups arrive after their leases were lost."""


@dataclass(frozen=True)
class Server:
    joins_at: int = 0
    num_slots: int = 4
    """Groups it generates at once."""
    ticks_per_token: int = 1
    update_ticks: int = 0
    """From noticing a newer version to having committed it; versions in between are skipped."""
    echo_ticks: int = 0
    """From the commit to the coordinator knowing."""
    outages: tuple[Outage, ...] = ()


@dataclass(frozen=True)
class Scenario:
    pacing: Pacing
    servers: tuple[Server, ...]
    num_versions: int
    over_age: Literal["mask", "keep", "drop"] = "mask"
    """`drop` is the peers' rule, for comparison: a group with any token past the bound is consumed."""
    mean_length: int = 20
    learner_ticks: int = 20
    """Mean ticks of one batch; each takes from half to one and a half of it."""
    failure_share: float = 0.0
    """Share of the ordinals whose rollouts all fail."""
    seed: int = 0

    def length(self, ordinal: int) -> int:
        """Lognormal, sigma 0.8, capped at six times the mean, at least 1. Tokens."""
        rng = random.Random(f"length {self.seed} {ordinal}")
        drawn = self.mean_length * math.exp(rng.gauss(0.0, 0.8) - 0.32)
        return max(1, min(round(drawn), 6 * self.mean_length))

    def fails(self, ordinal: int) -> bool:
        return random.Random(f"failure {self.seed} {ordinal}").random() < self.failure_share

    def train_ticks(self, batch_index: int) -> int:
        rng = random.Random(f"train {self.seed} {batch_index}")
        return max(1, round(self.learner_ticks * rng.uniform(0.5, 1.5)))


@dataclass(frozen=True)
class Batch:
    index: int
    ordinals: tuple[int, ...]
    runs: tuple[Runs, ...]
    """Of each group, in the order of `ordinals`."""


@dataclass(frozen=True)
class Observation:
    """The coordinator's counts after one event."""

    v: int
    k: int
    outstanding: int
    lost: int


@dataclass
class Outcome:
    scenario: Scenario
    batches: list[Batch] = field(default_factory=list)
    untrainable: dict[int, int] = field(default_factory=dict)
    """Ordinal -> the batch index at which it was consumed."""
    unused: set[int] = field(default_factory=set)
    """Granted at least once, and outstanding or lost at the end."""
    observations: set[Observation] = field(default_factory=set)
    num_granted: int = 0
    """Ordinals granted at least once: 0 to this, exclusive."""
    learner_version: int = 0
    ticks: int = 0
    learner_busy_ticks: int = 0


class _ServerState:
    def __init__(self, plan: Server) -> None:
        self.plan = plan
        self.is_up = False
        self.is_updating = False
        self.incarnation = 0
        """+1 whenever its leases are lost."""
        self.cut_off: set[int] = set()
        """Incarnations whose results still come."""
        self.echoed_version: int | None = None
        self.commit_ticks: list[int] = []
        self.commit_versions: list[int] = []
        self.leases: set[int] = set()

    def commit(self, now: int, version: int) -> None:
        self.commit_ticks.append(now)
        self.commit_versions.append(version)

    def sample(self, started_at: int, num_tokens: int) -> Runs:
        """Token n = 1..num_tokens is sampled at started_at + n * ticks_per_token."""
        ends = [*self.commit_ticks[1:], started_at + (num_tokens + 1) * self.plan.ticks_per_token]
        runs: list[tuple[int, int]] = []
        done = 0
        first = bisect_right(self.commit_ticks, started_at) - 1
        for version, end in zip(self.commit_versions[first:], ends[first:], strict=True):
            sampled = max(0, min((end - started_at - 1) // self.plan.ticks_per_token, num_tokens))
            if sampled > done:
                runs.append((version, sampled - done))
                done = sampled
        return tuple(runs)


class Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.outcome = Outcome(scenario)
        self.now = 0
        self.v = 0
        self.k = 0
        self.servers = [_ServerState(plan) for plan in scenario.servers]
        self.finished: dict[int, tuple[FinishedGroup, Runs]] = {}
        self.lost: list[int] = []
        self.done: set[int] = set()
        self.is_training = False
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._num_events = 0
        for server in self.servers:
            self._at(server.plan.joins_at, lambda server=server: self._join(server))
            for outage in server.plan.outages:
                self._at(outage.at, lambda server=server, outage=outage: self._lose(server, outage))

    def run(self, deadline_ticks: int) -> Outcome:
        """Until `num_versions` are trained, nothing can happen any more, or the deadline."""
        while self._events and self.v < self.scenario.num_versions and self.now <= deadline_ticks:
            self.now, _, event = heapq.heappop(self._events)
            event()
            self._coordinate()
        self.outcome.learner_version = self.v
        self.outcome.ticks = self.now
        self.outcome.unused = self._leased() | set(self.finished) | set(self.lost)
        return self.outcome

    def _at(self, tick: int, event: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (tick, self._num_events, event))

    # The coordinator.

    def _leased(self) -> set[int]:
        return set().union(*(server.leases for server in self.servers))

    def _outstanding(self) -> int:
        return len(self._leased()) + len(self.finished)

    def _coordinate(self) -> None:
        while self._form_batch():
            pass
        while self._grant():
            pass
        observation = Observation(self.v, self.k, self._outstanding(), len(self.lost))
        self.outcome.observations.add(observation)

    def _form_batch(self) -> bool:
        choice = choose_batch(
            [group for group, _ in self.finished.values()],
            batch_index=self.k,
            pacing=self.scenario.pacing,
            over_age="keep" if self.scenario.over_age == "keep" else "mask",
        )
        for ordinal in choice.consumed_untrainable:
            del self.finished[ordinal]
            self.done.add(ordinal)
            self.outcome.untrainable[ordinal] = self.k
        if choice.ordinals is None or not can_form_batch(num_batches_formed=self.k, learner_version=self.v):
            return False
        runs = tuple(self.finished.pop(ordinal)[1] for ordinal in choice.ordinals)
        self.done.update(choice.ordinals)
        self.outcome.batches.append(Batch(self.k, choice.ordinals, runs))
        self.k += 1
        self._train()
        return True

    def _grant(self) -> bool:
        """One lease, to the server with most free slots among those that may take one."""
        outstanding = self._outstanding()
        ready = [
            server
            for server in self.servers
            if server.is_up
            and server.echoed_version is not None
            and len(server.leases) < server.plan.num_slots
            and can_lease(
                self.scenario.pacing,
                outstanding=outstanding,
                num_batches_formed=self.k,
                server_version=server.echoed_version,
            )
        ]
        if not ready:
            return False
        server = max(ready, key=lambda server: server.plan.num_slots - len(server.leases))
        if self.lost:
            ordinal = heapq.heappop(self.lost)
        else:
            ordinal = self.outcome.num_granted
            self.outcome.num_granted += 1
        server.leases.add(ordinal)
        length = self.scenario.length(ordinal)
        incarnation, started_at = server.incarnation, self.now
        self._at(
            self.now + length * server.plan.ticks_per_token,
            lambda: self._finish(server, incarnation, ordinal, started_at),
        )
        return True

    def _accept(self, ordinal: int, runs: Runs) -> None:
        """The first result of an ordinal wins, whoever holds the lease now."""
        if ordinal in self.done or ordinal in self.finished:
            return
        for server in self.servers:
            server.leases.discard(ordinal)
        if ordinal in self.lost:
            self.lost.remove(ordinal)
            heapq.heapify(self.lost)
        first, newest = runs[0][0], runs[-1][0]
        trainable = first if self.scenario.over_age == "drop" else newest
        group = FinishedGroup(ordinal, first, None if self.scenario.fails(ordinal) else trainable)
        self.finished[ordinal] = (group, runs)

    # The learner.

    def _train(self) -> None:
        if not self.is_training and self.k > self.v:
            self.is_training = True
            ticks = self.scenario.train_ticks(self.v)
            self.outcome.learner_busy_ticks += ticks
            self._at(self.now + ticks, self._publish)

    def _publish(self) -> None:
        self.v += 1
        self.is_training = False
        self._train()
        for server in self.servers:
            self._update(server)

    # The servers.

    def _join(self, server: _ServerState) -> None:
        server.is_up = True
        server.commit(self.now, self.v)
        self._echo_later(server)

    def _update(self, server: _ServerState) -> None:
        if server.is_up and not server.is_updating and server.commit_versions[-1] < self.v:
            server.is_updating = True
            incarnation = server.incarnation
            self._at(self.now + server.plan.update_ticks, lambda: self._commit(server, incarnation))

    def _commit(self, server: _ServerState, incarnation: int) -> None:
        if server.incarnation == incarnation:
            server.is_updating = False
            server.commit(self.now, self.v)
            self._echo_later(server)

    def _echo_later(self, server: _ServerState) -> None:
        incarnation, version = server.incarnation, server.commit_versions[-1]
        self._at(self.now + server.plan.echo_ticks, lambda: self._echo(server, incarnation, version))

    def _echo(self, server: _ServerState, incarnation: int, version: int) -> None:
        if server.incarnation == incarnation:
            server.echoed_version = version
            self._update(server)

    def _finish(self, server: _ServerState, incarnation: int, ordinal: int, started_at: int) -> None:
        if server.incarnation == incarnation or incarnation in server.cut_off:
            self._accept(ordinal, server.sample(started_at, self.scenario.length(ordinal)))

    def _lose(self, server: _ServerState, outage: Outage) -> None:
        if not server.is_up:
            return
        server.is_up = server.is_updating = False
        if outage.result_still_comes:
            server.cut_off.add(server.incarnation)
        server.incarnation += 1
        server.echoed_version = None
        for ordinal in server.leases:
            heapq.heappush(self.lost, ordinal)
        server.leases.clear()
        self._at(self.now + outage.down_ticks, lambda: self._join(server))
