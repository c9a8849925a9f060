"""Evaluations of versions: which prompt of which version is with which server. No I/O, no clock of its own.

    published --due--> waiting --grant--> leased --accept--> finished;  all finished: the evaluation is complete
                          ^                  |
                          `-------lose-------'            out of reach, or past its deadline: it is cut

An evaluation of v has tokens of exactly v. So only a server that serves v, and was offered nothing newer, takes
part (`ServerState.serves`), and it is offered nothing newer until it has done its share (`keeps`). A snapshot
is unlinked when the next version is finished: so the next one's announcement is not answered before a server
serves v (`needs_snapshot`). Training goes on meanwhile, as far as pacing lets it.

eval_side.py grants, answers and reports; server_side.py asks `keeps` before it offers a version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from asyncrl.config import EvalConfig
from asyncrl.coordinator.servers import ServerState
from asyncrl.types import TrajectoryGroup


@dataclass(slots=True)
class Evaluation:
    """One version's. Prompts are named by their position in the evaluation's data set."""

    version: int
    num_prompts: int
    published_s: float
    began_s: float | None = None
    """When its first prompt was leased: a server may have to start before that."""
    ended_s: float | None = None
    """When it was complete, or was cut."""
    waiting: deque[int] = field(default_factory=deque)
    holders: dict[int, bytes] = field(default_factory=dict)
    """The server that works on each leased prompt."""
    leases: dict[bytes, dict[int, int]] = field(default_factory=dict)
    """The same by server, so that looking at one costs nothing for the others: its prompts, and how many heartbeats
    in a row did not list each."""
    finished: dict[int, TrajectoryGroup] = field(default_factory=dict)
    cut: str = ""
    """Why it ended before it was complete."""

    @property
    def since_s(self) -> float:
        """What its deadline and its duration count from."""
        return self.published_s if self.began_s is None else self.began_s

    @property
    def is_complete(self) -> bool:
        return len(self.finished) == self.num_prompts

    def leases_of(self, server: bytes) -> dict[int, int]:
        return self.leases.get(server, {})

    def grant(self, server: bytes) -> int:
        """Leases the next waiting prompt."""
        row_index = self.waiting.popleft()
        self.holders[row_index] = server
        self.leases.setdefault(server, {})[row_index] = 0
        return row_index

    def lose(self, row_indices: Collection[int]) -> None:
        """Takes leases back: they are the next to be granted."""
        for row_index in row_indices:
            self._end_lease(row_index)
            self.waiting.appendleft(row_index)

    def awaits(self, row_index: int) -> bool:
        return 0 <= row_index < self.num_prompts and row_index not in self.finished

    def finish(self, row_index: int, group: TrajectoryGroup) -> None:
        """Takes in the result of a prompt that it awaits."""
        if row_index in self.holders:
            self._end_lease(row_index)
        else:
            self.waiting.remove(row_index)  # its lease was lost, and the result came all the same
        self.finished[row_index] = group

    def _end_lease(self, row_index: int) -> None:
        server = self.holders.pop(row_index)
        del self.leases[server][row_index]
        if not self.leases[server]:
            del self.leases[server]


class Evaluations:
    """The evaluations that have begun and not ended, by version."""

    def __init__(
        self, config: EvalConfig, *, num_prompts: int, max_versions: int, done: Collection[int] = ()
    ) -> None:
        """`done`: versions that a run before this one has evaluated."""
        self._every = config.every
        self._num_prompts = num_prompts
        self._max_versions = max_versions
        self._done = frozenset(done)
        self.live: dict[int, Evaluation] = {}

    def is_due(self, version: int) -> bool:
        """Whether `version` is evaluated: before training, every so often, and at the end."""
        if not self._every or version in self._done:
            return False
        return version % self._every == 0 or version == self._max_versions

    def published(self, version: int, now_s: float) -> None:
        """Begins the evaluation of a finished version if it is due."""
        if self.is_due(version):
            waiting = deque(range(self._num_prompts))
            self.live[version] = Evaluation(version, self._num_prompts, now_s, waiting=waiting)

    def of(self, server: ServerState) -> Evaluation | None:
        """The one that the server can take part in."""
        evaluation = self.live.get(-1 if server.version is None else server.version)
        return evaluation if evaluation is not None and server.serves(evaluation.version) else None

    def keeps(self, server: ServerState) -> bool:
        """Whether the server must not be offered a newer version yet."""
        evaluation = self.of(server)
        return evaluation is not None and bool(evaluation.waiting or evaluation.leases_of(server.peer))

    def needs_snapshot(self, newest_version: int, servers: Collection[ServerState]) -> bool:
        """Whether the snapshot of the newest version must stay: it is evaluated, and nobody serves it yet."""
        return newest_version in self.live and not any(server.serves(newest_version) for server in servers)

    def fair_share(self, num_servers: int) -> int:
        """Prompts that a server may hold at once where so many serve the same version, or are about to."""
        return -(-self._num_prompts // num_servers)

    def has_work_for(self, server: ServerState) -> bool:
        evaluation = self.of(server)
        return evaluation is not None and bool(evaluation.waiting)

    def grant(self, server: ServerState) -> tuple[Evaluation, int] | None:
        """The next prompt for a server, by position in the data set; None when there is nothing for it."""
        evaluation = self.of(server)
        if evaluation is None or not evaluation.waiting:
            return None
        return evaluation, evaluation.grant(server.peer)

    def awaits(self, version: int, row_index: int) -> bool:
        """Whether a result is still wanted: the first one wins, whoever sends it."""
        evaluation = self.live.get(version)
        return evaluation is not None and evaluation.awaits(row_index)

    def num_leases_of(self, server: bytes) -> int:
        return sum(len(evaluation.leases_of(server)) for evaluation in self.live.values())

    def lose_server(self, server: bytes) -> int:
        """Takes back every lease of a server that is gone. Returns how many there were."""
        lost = 0
        for evaluation in self.live.values():
            leases = list(evaluation.leases_of(server))
            evaluation.lose(leases)
            lost += len(leases)
        return lost

    def find_missing(self, server: bytes, listed: Collection[tuple[int, int]]) -> int:
        """Takes back the leases that two heartbeats of their server in a row did not list. Returns how many."""
        lost, known = 0, set(listed)
        for version, evaluation in self.live.items():
            leases = evaluation.leases_of(server)
            for row_index, num_missed in leases.items():
                leases[row_index] = 0 if (version, row_index) in known else num_missed + 1
            missing = [row_index for row_index, num_missed in leases.items() if num_missed >= 2]
            evaluation.lose(missing)
            lost += len(missing)
        return lost

    def cut_out_of_reach(self, newest_version: int, servers: Collection[ServerState]) -> None:
        """Cuts those that no server can go on with: nobody is left at the version, whose snapshot is gone.

        While the version is the newest, its snapshot is there for a server that joins.
        """
        for evaluation in self._unfinished():
            version = evaluation.version
            if version != newest_version and not any(server.serves(version) for server in servers):
                evaluation.cut = f"no server is at version {version}, and its snapshot is gone"

    def cut_overdue(self, now_s: float, limit_s: float) -> None:
        for evaluation in self._unfinished():
            if now_s - evaluation.since_s > limit_s:
                evaluation.cut = (
                    f"{len(evaluation.finished)} of {evaluation.num_prompts} prompts were done within "
                    f"timeouts.eval_s = {limit_s:g} s; raise it, or evaluate fewer prompts (eval.max_prompts)"
                )

    def cut_all(self, reason: str) -> None:
        for evaluation in self._unfinished():
            evaluation.cut = reason

    def take_ended(self, now_s: float) -> list[Evaluation]:
        """Those that are complete or cut, in the order of their versions. They are live no longer."""
        ended = [e for e in self.live.values() if e.is_complete or e.cut]
        for evaluation in ended:
            evaluation.ended_s = now_s
            del self.live[evaluation.version]
        return ended

    def _unfinished(self) -> Iterator[Evaluation]:
        return (evaluation for evaluation in self.live.values() if not evaluation.is_complete)
