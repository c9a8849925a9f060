"""Who holds which group: leases, finished groups, and what has been consumed. No I/O, no clock of its own.

An ordinal's life:

    next ordinal --grant--> leased --accept--> finished --form_batch--> trained
          ^                   |                   `----untrainable----> consumed without training
          `---- granted again, lowest ordinal first <--lose-- '

The coordinator (coordinator.py) is its one user. Staleness lives in staleness.py; this file only counts.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from asyncrl.coordinator.batches import describe_finished
from asyncrl.coordinator.staleness import FinishedGroup, OverAge, Pacing, can_lease, choose_batch
from asyncrl.types import TrajectoryGroup

MAX_REFUSALS = 3
"""The same request samples the same tokens, so a result that was refused so often will be again."""


class Verdict(Enum):
    """What became of a group that arrived."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """The ordinal already has a result; the first one wins."""
    UNKNOWN = "unknown"
    """The ordinal was never leased, or the redraw is not the one that was leased."""


@dataclass(slots=True)
class LeaseRecord:
    """One group that one server works on."""

    ordinal: int
    redraw: int
    server: bytes
    missed_heartbeats: int = 0
    """Heartbeats of its server in a row that did not list it."""


@dataclass(slots=True)
class Consumed:
    """The ordinals that are done with, as a frontier and the few beyond it: memory stays bounded."""

    frontier: int = 0
    """Every ordinal below it is consumed."""
    beyond: set[int] = field(default_factory=set)

    def add(self, ordinal: int) -> None:
        self.beyond.add(ordinal)
        while self.frontier in self.beyond:
            self.beyond.remove(self.frontier)
            self.frontier += 1

    def __contains__(self, ordinal: int) -> bool:
        return ordinal < self.frontier or ordinal in self.beyond

    def without(self, ordinals: Collection[int]) -> Consumed:
        """The same, but for some of them."""
        frontier = min([self.frontier, *ordinals])
        beyond = {*range(frontier, self.frontier), *self.beyond}.difference(ordinals)
        return Consumed(frontier, beyond)


class Ledger:
    """The one place that knows where every ordinal is."""

    def __init__(self, pacing: Pacing, over_age: OverAge) -> None:
        self.pacing = pacing
        self.over_age: OverAge = over_age
        self.num_batches_formed = 0
        self.consumed = Consumed()
        self.counts: Counter[str] = Counter()
        self._leases: dict[int, LeaseRecord] = {}
        self._by_server: dict[bytes, set[int]] = {}
        self._finished: dict[int, TrajectoryGroup] = {}
        self._described: dict[int, FinishedGroup] = {}
        self._lost: list[int] = []
        self._refusals: Counter[int] = Counter()
        self.num_untrainable_in_a_row = 0
        """Groups consumed without training since the last one that came with something to train."""
        self.num_filtered_in_a_row = 0
        """Groups that the recipe filtered since the last one that it kept."""
        self._untrainable: list[TrajectoryGroup] = []
        self._next_ordinal = 0

    def resume_at(self, num_batches: int, consumed: Consumed) -> None:
        """Goes on after so many batches. What was granted by then and is not consumed is as lost: it is granted again.

        So `outstanding` + lost + batches x B stays within its bound (staleness.py): they were counted before, too.
        """
        self.num_batches_formed = num_batches
        self.consumed = consumed
        self._next_ordinal = max(consumed.beyond, default=consumed.frontier - 1) + 1
        self._lost = [o for o in range(consumed.frontier, self._next_ordinal) if o not in consumed]

    @property
    def outstanding(self) -> int:
        """Groups leased or finished, and not in a batch."""
        return len(self._leases) + len(self._finished)

    @property
    def num_leased(self) -> int:
        return len(self._leases)

    @property
    def num_finished(self) -> int:
        return len(self._finished)

    def leases_of(self, server: bytes) -> list[LeaseRecord]:
        return [self._leases[ordinal] for ordinal in sorted(self._by_server.get(server, ()))]

    def num_leases_of(self, server: bytes) -> int:
        return len(self._by_server.get(server, ()))

    def grant(self, server: bytes, server_version: int) -> LeaseRecord | None:
        """The next lease for a server, or None while pacing forbids one. Lost ordinals go first."""
        if not can_lease(
            self.pacing,
            outstanding=self.outstanding,
            num_batches_formed=self.num_batches_formed,
            server_version=server_version,
        ):
            return None
        if self._lost:
            ordinal = heapq.heappop(self._lost)
        else:
            ordinal = self._next_ordinal
            self._next_ordinal += 1
        lease = LeaseRecord(ordinal, redraw=0, server=server)
        self._leases[ordinal] = lease
        self._by_server.setdefault(server, set()).add(ordinal)
        return lease

    def accept(self, group: TrajectoryGroup, *, is_filtered: bool = False) -> Verdict:
        """Takes a finished group in, whoever sends it: the first result of an ordinal wins.

        `is_filtered`: the recipe does not train it. It is consumed, so that the next ordinal takes its place.
        """
        ordinal = group.ordinal
        if ordinal in self._finished or ordinal in self.consumed:
            self.counts["groups_duplicate"] += 1
            return Verdict.DUPLICATE
        if group.redraw != 0 or not 0 <= ordinal < self._next_ordinal:
            self.counts["groups_unknown"] += 1
            return Verdict.UNKNOWN
        if lease := self._leases.pop(ordinal, None):
            self._by_server[lease.server].discard(ordinal)
        else:  # its lease was lost, and the result came all the same
            self._lost.remove(ordinal)
            heapq.heapify(self._lost)
        self._refusals.pop(ordinal, None)
        described = describe_finished(group)
        if described.newest_trainable_version is None:
            self._consume_untrainable(ordinal, group)
        elif is_filtered:
            self.consumed.add(ordinal)
            self._untrainable.append(group)
            self.counts["groups_filtered"] += 1
            self.num_filtered_in_a_row += 1
            self.num_untrainable_in_a_row = 0
        else:
            self.num_untrainable_in_a_row = self.num_filtered_in_a_row = 0
            self._finished[ordinal] = group
            self._described[ordinal] = described
        return Verdict.ACCEPTED

    def lose(self, ordinals: list[int]) -> None:
        """Takes leases back; they leave the outstanding set until they are granted again."""
        for ordinal in ordinals:
            lease = self._leases.pop(ordinal)
            self._by_server[lease.server].discard(ordinal)
            heapq.heappush(self._lost, ordinal)
            self.counts["leases_lost"] += 1

    def refuse(self, ordinal: int, server: bytes) -> bool:
        """The server's result of this ordinal was not fit to read. Leased anew, but not for ever.

        Returns whether the ordinal is given up: consumed without training after MAX_REFUSALS.
        """
        if ordinal not in self._by_server.get(server, ()):
            return False
        self.lose([ordinal])
        self.counts["groups_refused"] += 1
        self._refusals[ordinal] += 1
        if self._refusals[ordinal] < MAX_REFUSALS:
            return False
        self._lost.remove(ordinal)
        heapq.heapify(self._lost)
        del self._refusals[ordinal]
        self._consume_untrainable(ordinal)
        return True

    def lose_server(self, server: bytes) -> list[int]:
        """Takes back every lease of a server that is gone. Returns their ordinals."""
        ordinals = sorted(self._by_server.get(server, ()))
        self.lose(ordinals)
        self._by_server.pop(server, None)
        return ordinals

    def form_batch(self) -> list[TrajectoryGroup] | None:
        """The groups of the next batch, sorted by ordinal, or None while it cannot form.

        Fewer than B finished groups never form a batch, so the choice is made only from B on.
        """
        if len(self._finished) < self.pacing.batch_size:
            return None
        choice = choose_batch(
            self._described.values(),
            batch_index=self.num_batches_formed,
            pacing=self.pacing,
            over_age=self.over_age,
        )
        for ordinal in choice.consumed_untrainable:  # it had a reward, but waited past its age
            self._consume_untrainable(ordinal, self._take(ordinal))
            self.num_untrainable_in_a_row = 0
        if choice.ordinals is None:
            return None
        self.num_batches_formed += 1
        groups = [self._take(ordinal) for ordinal in choice.ordinals]
        for ordinal in choice.ordinals:
            self.consumed.add(ordinal)
        return groups

    def take_untrainable(self) -> list[TrajectoryGroup]:
        """The groups consumed without training since the last call; refused ones are not among them."""
        taken, self._untrainable = self._untrainable, []
        return taken

    def _take(self, ordinal: int) -> TrajectoryGroup:
        del self._described[ordinal]
        return self._finished.pop(ordinal)

    def _consume_untrainable(self, ordinal: int, group: TrajectoryGroup | None = None) -> None:
        if group is not None:
            self._untrainable.append(group)
        self.consumed.add(ordinal)
        self.counts["groups_untrainable"] += 1
        self.num_untrainable_in_a_row += 1
