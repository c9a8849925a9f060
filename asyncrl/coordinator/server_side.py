"""The coordinator's side towards the rollout servers: taking them in, leasing, offering versions, giving up."""

from __future__ import annotations

import time

from asyncrl.config import Config, shared_digest
from asyncrl.coordinator.evaluation import Evaluations
from asyncrl.coordinator.ledger import LeaseRecord, Ledger, Verdict
from asyncrl.coordinator.mailbox import Mailbox, Refusal
from asyncrl.coordinator.servers import Servers, ServerState
from asyncrl.coordinator.shaping import admit
from asyncrl.coordinator.status import RunStatus
from asyncrl.envs.dataset import Dataset
from asyncrl.envs.order import DataOrder, request_seed
from asyncrl.errors import PeerLost, RewardError, WireError
from asyncrl.run_directory import RunDirectory
from asyncrl.stream.codec import Received
from asyncrl.stream.messages import (
    Acknowledged,
    AnyMessage,
    Failed,
    GroupFinished,
    Heartbeat,
    Lease,
    ServerHello,
    ServerWelcome,
    Stop,
    VersionCommitted,
    VersionRefused,
    WeightsOffer,
)
from asyncrl.stream.sizes import max_group_bytes
from asyncrl.types import Int32, Status, Trajectory, TrajectoryGroup

MAX_REFUSED_IN_A_ROW = 5
MAX_UNTRAINABLE_BATCHES = 4
"""A run whose last groups, so many batches of them, had nothing to train is ended. One batch of them suffices
while no rollout of the run has ever been scored: the reward itself is broken then."""


class ServerSide:
    """Owns the registry of servers. The coordinator hands it their messages, and the clock."""

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        order: DataOrder,
        mailbox: Mailbox,
        ledger: Ledger,
        evaluations: Evaluations,
        status: RunStatus,
        directory: RunDirectory,
    ) -> None:
        self.servers = Servers(config.timeouts, max_group_bytes(config))
        self.num_new_tokens = 0
        """Completion tokens accepted since the learner's last step."""
        self._config = config
        self._dataset = dataset
        self._order = order
        self._mailbox = mailbox
        self._ledger = ledger
        self._evaluations = evaluations
        self._status = status
        self._directory = directory
        self._algorithm = config.resolved_algorithm
        self._offer: WeightsOffer | None = None
        self._last_detail = ""

    async def take_in(self, peer: bytes, name: str, hello: ServerHello) -> None:
        """Welcomes a server and offers it the newest version; refuses one with another configuration."""
        if peer in self.servers:  # it starts anew under its old name: what it had leased is lost
            self._forget(self.servers[peer])
            self._status.counts["servers_lost"] += 1
        digest = shared_digest(self._config)
        if hello.config_digest != digest:
            self._status.counts["servers_refused"] += 1
            self._status.note(f"refused {name}: another configuration")
            await self._mailbox.tell(
                peer,
                Stop(
                    f"the rollout server's configuration (digest {hello.config_digest}) differs from the "
                    f"learner's ({digest}); start both with the same file and overrides"
                ),
            )
            self._mailbox.forget(peer)
            return
        self._status.counts["servers_joined"] += 1
        server = self.servers.join(peer, name, hello, time.monotonic())
        self._status.note(f"{server.name} is up")
        await self.send(server, ServerWelcome())
        await self._offer_to(server)

    async def take(self, server: ServerState, received: Received) -> None:
        """Handles one message of a server that was taken in."""
        match received.body:
            case Heartbeat() as heartbeat:
                self.servers.heartbeat(server.peer, heartbeat, time.monotonic())
                self._find_missing_leases(server, heartbeat)
            case GroupFinished():
                await self._take_group(server, received.groups[0])
            case VersionCommitted() as committed:
                server.version = committed.version
                self._directory.append_spans(server.name, committed.spans)
                self._status.record_commit(committed.version, committed.spans)
            case VersionRefused(version, error):
                self._status.counts["versions_refused"] += 1
                self._status.note(f"{server.name} could not take version {version}: {error}")
            case Failed() as failed:
                await self.give_up(server, failed.error)
            case body:
                raise WireError(f"{server.name} sent {type(body).__name__}, which is not for it to send")

    async def offer(self, offer: WeightsOffer) -> None:
        """Offers a finished version to every server; those that join later get it with their welcome."""
        self._offer = offer
        await self.offer_newest()

    async def offer_newest(self) -> None:
        """Offers the newest version to the servers that have not been, unless an evaluation keeps them at theirs."""
        for server in self.servers.all():
            await self._offer_to(server)

    async def _offer_to(self, server: ServerState) -> None:
        offer = self._offer
        if offer is None or server.offered == offer.version or self._evaluations.keeps(server):
            return
        server.offered = offer.version
        await self.send(server, offer)

    async def lease(self) -> None:
        """Grants leases while pacing and credits allow, the least busy server first."""
        while granted := self._next_lease():
            server, lease = granted
            _, row = self._order.place(lease.ordinal)
            seeds = [
                request_seed(self._config.seed, lease.ordinal, sample, lease.redraw)
                for sample in range(self._config.rollouts_per_group)
            ]
            kept = self._dataset[row]
            message = Lease(lease.ordinal, lease.redraw, seeds, kept.row, self._config.num_greedy)
            await self.send(server, message, kept.token_ids)

    def _next_lease(self) -> tuple[ServerState, LeaseRecord] | None:
        for server in self.servers.next_to_lease():
            assert server.version is not None
            if lease := self._ledger.grant(server.peer, server.version):
                self._count_leases(server)
                return server, lease
        return None

    async def refuse(self, peer: bytes, refusal: Refusal) -> None:
        """Counts a message that breaks the schema; a server that keeps sending them is given up."""
        self._status.counts["messages_refused"] += 1
        self._status.note(f"refused a message: {refusal.error}")
        if peer not in self.servers:
            return
        server = self.servers[peer]
        server.num_refused += 1
        if refusal.group is not None:
            ordinal, redraw = refusal.group
            if self._ledger.refuse(ordinal, peer):
                self._last_detail = f"refused: {refusal.error}"
                self._status.note(f"group {ordinal} is left out: its results were refused again and again")
            self._count_leases(server)
            await self.send(server, Acknowledged([(ordinal, redraw)]))  # so that its sender forgets it
        if server.num_refused >= MAX_REFUSED_IN_A_ROW:
            await self.give_up(server, f"{server.num_refused} refused messages in a row: {refusal.error}")

    async def give_up(self, server: ServerState, reason: str) -> None:
        """The server is lost: its leases go to others."""
        if server.peer not in self.servers:
            return
        self._status.counts["servers_lost"] += 1
        lost = self._forget(server)
        self._status.note(f"lost {server.name}: {reason}; {len(lost)} groups are leased anew")
        await self._mailbox.tell(server.peer, Stop(reason))  # and again, should it go on all the same

    def let_go(self, peer: bytes, *, expected: bool) -> None:
        """The server said Bye."""
        server = self.servers[peer]
        lost = self._forget(server)
        self._mailbox.forget(peer)
        if not expected:
            self._status.note(f"{server.name} left; {len(lost)} groups are leased anew")

    async def give_up_the_lost(self, now_s: float) -> None:
        """Gives up servers that are silent, or whose engine stands still, past their deadlines."""
        timeouts = self._config.timeouts
        for server in self.servers.silent(now_s):
            reason = f"silent for timeouts.heartbeat_s = {timeouts.heartbeat_s:g} s"
            await self.give_up(server, reason if server.is_connected else "its connection broke")
        for server in self.servers.stalled(now_s):
            still_s = now_s - server.last_step_s
            await self.give_up(server, f"{server.state} without progress for {still_s:.0f} s")

    async def stop_all(self, error: str) -> None:
        for server in self.servers.all():
            await self.send(server, Stop(error))

    async def _take_group(self, server: ServerState, group: TrajectoryGroup) -> None:
        admitted = admit(group, self._algorithm, num_greedy=self._config.num_greedy)
        verdict = self._ledger.accept(admitted.group, is_filtered=admitted.is_filtered)
        self._count_leases(server)
        await self.send(server, Acknowledged([(group.ordinal, group.redraw)]))
        if verdict is Verdict.UNKNOWN:
            raise WireError(f"{server.name} sent group {group.ordinal}, which was never leased")
        if verdict is Verdict.ACCEPTED:
            server.num_refused = 0
            self._status.record_progress()
            self._directory.append_spans(server.name, group.spans)
            self.num_new_tokens += sum(len(t) for t in group.trajectories)
            for trajectory in group.trajectories:
                self._count_rollout(trajectory)

    def _count_rollout(self, trajectory: Trajectory) -> None:
        """Failed rewards are shown as well as counted: the 1st, the 10th, the 100th of each kind ..."""
        name = f"trajectories_{trajectory.status}"
        self._status.counts[name] += 1
        count = self._status.counts[name]
        if trajectory.status is not Status.SCORED:
            self._last_detail = trajectory.detail
            if str(count).strip("0") == "1":
                ends = (
                    ""
                    if self._has_scored
                    else f"; none is scored yet, and {self._max_untrainable} such groups end the run"
                )
                self._status.note(f"{trajectory.status} ({count} so far{ends}): {trajectory.detail}")

    @property
    def _has_scored(self) -> bool:
        return self._status.counts[f"trajectories_{Status.SCORED}"] > 0

    @property
    def _max_untrainable(self) -> int:
        """Groups in a row without anything to train that end the run."""
        num_batches = MAX_UNTRAINABLE_BATCHES if self._has_scored else 1
        return num_batches * self._config.learner.prompts_per_batch

    def check_rewards(self) -> None:
        """Raises RewardError when nothing can be trained any more, instead of drawing prompts for ever."""
        num_filtered = self._ledger.num_filtered_in_a_row
        if num_filtered >= self._algorithm.max_filtered_batches * self._config.learner.prompts_per_batch:
            raise RewardError(
                f"algorithm.filter left out {num_filtered} groups in a row (algorithm.max_filtered_batches "
                f"{self._algorithm.max_filtered_batches} x learner.prompts_per_batch): every one is too easy or too "
                "hard, or the reward gives all answers the same (trajectories/untrainable.jsonl has them); use other "
                "prompts, a larger rollout.group_size, or another filter"
            )
        num_groups = self._ledger.num_untrainable_in_a_row
        if num_groups >= self._max_untrainable:
            raise RewardError(
                f"{num_groups} groups in a row have no token to train (trajectories/untrainable.jsonl has the first); "
                f"the last rollout without a reward says: {self._last_detail or 'nothing'}"
            )

    def _find_missing_leases(self, server: ServerState, heartbeat: Heartbeat) -> None:
        """A lease that two heartbeats in a row do not list is lost (one may have crossed it on the way)."""
        listed = set(heartbeat.leases)
        for lease in self._ledger.leases_of(server.peer):
            lease.missed_heartbeats = 0 if lease.ordinal in listed else lease.missed_heartbeats + 1
            if lease.missed_heartbeats >= 2:
                self._ledger.lose([lease.ordinal])
        self._count_lost_eval_leases(self._evaluations.find_missing(server.peer, heartbeat.eval_leases))
        self._count_leases(server)

    def _count_leases(self, server: ServerState) -> None:
        server.count_leases(
            self._ledger.num_leases_of(server.peer),
            time.monotonic(),
            num_eval_leases=self._evaluations.num_leases_of(server.peer),
        )

    def _count_lost_eval_leases(self, num_lost: int) -> None:
        if num_lost:
            self._status.counts["eval_leases_lost"] += num_lost

    def _forget(self, server: ServerState) -> list[int]:
        self.servers.leave(server.peer, time.monotonic())
        self._count_lost_eval_leases(self._evaluations.lose_server(server.peer))
        return self._ledger.lose_server(server.peer)

    async def send(self, server: ServerState, body: AnyMessage, prompt_ids: Int32 | None = None) -> None:
        """A server that takes nothing is left to the next look at the deadlines."""
        try:
            await self._mailbox.send(server.peer, body, prompt_ids=prompt_ids)
        except PeerLost:
            self._status.counts["sends_failed"] += 1
            server.is_connected = False
