"""The coordinator: owns the data order, the leases, the staleness rule and the batches. Never a model.

One asyncio object in one light process without torch; tests run it in theirs.

    consumes                           does                                      produces
    GroupFinished   (servers)          ledger.accept, forms batches              Acknowledged, Batch (ranks)
    VersionAnnounced (rank 0)          records it; learner_version = v           VersionRecorded
    VersionPublished (rank 0)          remembers the newest version              WeightsOffer (servers)
    VersionCommitted (servers)         s_j = v, leases what pacing allows        Lease (servers)
    Heartbeat, Hello, Bye, silence     takes in, keeps or gives up a server      ServerWelcome, Stop
    StepReport      (rank 0)           one line of metrics.jsonl                 Stop after the last version

It waits on its one socket and on a clock for deadlines, and ends when `learner.max_versions` are trained, or
with the first cause of failure.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

from asyncrl.config import Config
from asyncrl.config_file import shared_digest
from asyncrl.coordinator.batches import MaskedGroup, batch_metrics, mask_group, plan_batch
from asyncrl.coordinator.ledger import LeaseRecord, Ledger, Verdict
from asyncrl.coordinator.mailbox import Mailbox
from asyncrl.coordinator.order import place, request_seed
from asyncrl.coordinator.servers import Servers, ServerState
from asyncrl.coordinator.staleness import Pacing, can_form_batch
from asyncrl.coordinator.status import RunStatus
from asyncrl.envs.dataset import Dataset
from asyncrl.errors import PeerLost, WireError, first_cause
from asyncrl.run_directory import RunDirectory
from asyncrl.stream.codec import Received, group_fields
from asyncrl.stream.messages import (
    Acknowledged,
    AnyMessage,
    Batch,
    Bye,
    Failed,
    GroupFinished,
    Heartbeat,
    Lease,
    RankHello,
    RankWelcome,
    ServerHello,
    ServerWelcome,
    StepReport,
    Stop,
    VersionAnnounced,
    VersionCommitted,
    VersionPublished,
    VersionRecorded,
    WeightsOffer,
)
from asyncrl.types import Int32, Span, TrajectoryGroup

MAX_REFUSED_IN_A_ROW = 5


class Coordinator:
    """Serves one run, from the first Hello to the last Bye."""

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        mailbox: Mailbox,
        directory: RunDirectory,
    ) -> None:
        self.config = config
        self.dataset = dataset
        self.mailbox = mailbox
        self.directory = directory
        pacing = Pacing(config.learner.prompts_per_batch, config.max_staleness)
        self.ledger = Ledger(pacing, config.over_age)  # pyright: ignore[reportArgumentType]
        self.servers = Servers(config.timeouts)
        self.status = RunStatus(config.learner.max_versions)
        self.counts: Counter[str] = Counter()
        self._ranks: dict[int, bytes] = {}
        self._learner_version = -1
        """Newest announced version; -1 before the learner has announced its first."""
        self._offer: WeightsOffer | None = None
        self._formed: dict[int, tuple[dict[str, float], list[TrajectoryGroup]]] = {}
        self._digest = shared_digest(config)
        self.ending = asyncio.Event()
        """Set when the last version is trained: from then on peers may leave."""
        self._departed = asyncio.Event()
        self._started_s = self._progress_s = self._step_s = time.monotonic()
        self._tokens_since_step = 0

    async def run(self) -> None:
        """Returns when every version is trained and every peer has left. Raises the first cause otherwise."""
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = [tasks.create_task(self._serve()), tasks.create_task(self._keep_deadlines())]
                await self.ending.wait()
                await self._say_goodbye()
                for task in serving:
                    task.cancel()
        except BaseExceptionGroup as group:
            cause = first_cause(group)
            await self.stop_peers(str(cause))
            raise cause from None

    async def stop_peers(self, error: str) -> None:
        """Tells every peer that the run ends; an empty error is a normal end."""
        for peer in [*self._ranks.values(), *(server.peer for server in self.servers.all())]:
            await self._send(peer, Stop(error))

    async def _serve(self) -> None:
        while True:
            peer, received = await self.mailbox.recv()
            if isinstance(received, WireError):
                await self._refuse(peer, received)
            else:
                await self._take_message(peer, received)

    async def _take_message(self, peer: bytes, received: Received) -> None:
        if peer in self.servers:
            server = self.servers[peer]
            server.last_heard_s = time.monotonic()
            server.num_refused = 0
        match received.body:
            case ServerHello() as hello:
                await self._take_in_server(peer, hello)
            case RankHello() as hello:
                await self._take_in_rank(peer, hello)
            case Failed() as failed:
                raise PeerLost(
                    f"{received.header.sender} failed: {failed.error}\n{failed.traceback}".rstrip()
                )
            case Bye():
                await self._let_go(peer)
            case Heartbeat() | GroupFinished() | VersionCommitted() if peer in self.servers:
                await self._from_server(self.servers[peer], received)
            case VersionAnnounced() | VersionPublished() | StepReport() if peer == self._ranks.get(0):
                await self._from_rank_0(peer, received)
            case _:
                kind = type(received.body).__name__
                await self._refuse(peer, WireError(f"{received.header.sender} sent {kind} out of turn"))
                await self._send(peer, Stop("the coordinator has given this process up; start it again"))

    # ---- rollout servers -------------------------------------------------------------------------------

    async def _take_in_server(self, peer: bytes, hello: ServerHello) -> None:
        if hello.config_digest != self._digest:
            await self._send(
                peer,
                Stop(
                    f"the rollout server's configuration (digest {hello.config_digest}) differs from the "
                    f"learner's ({self._digest}); start both with the same file and overrides"
                ),
            )
            self.counts["servers_refused"] += 1
            return
        self.servers.join(peer, hello, time.monotonic())
        self.counts["servers_joined"] += 1
        await self._send(peer, ServerWelcome())
        if self._offer is not None:
            await self._send(peer, self._offer)

    async def _from_server(self, server: ServerState, received: Received) -> None:
        match received.body:
            case Heartbeat() as heartbeat:
                self.servers.heartbeat(server.peer, heartbeat, time.monotonic())
                self._find_missing_leases(server, heartbeat)
            case GroupFinished():
                await self._take_group(server, received.groups[0])
            case VersionCommitted() as committed:
                server.version = committed.version
                self.directory.append_spans(server.name, committed.spans)
                self.status.record_commit(committed.version, committed.spans)
        await self._lease()

    async def _take_group(self, server: ServerState, group: TrajectoryGroup) -> None:
        verdict = self.ledger.accept(group)
        self._count_leases(server)
        await self._send(server.peer, Acknowledged([(group.ordinal, group.redraw)]))
        if verdict is Verdict.UNKNOWN:
            await self._refuse(
                server.peer, WireError(f"{server.name} sent group {group.ordinal}, which was never leased")
            )
        if verdict is not Verdict.ACCEPTED:
            return
        self.directory.append_spans(server.name, group.spans)
        self._tokens_since_step += sum(len(t) for t in group.trajectories)
        self.counts.update(f"trajectories_{t.status}" for t in group.trajectories)
        await self._form_batches()

    def _find_missing_leases(self, server: ServerState, heartbeat: Heartbeat) -> None:
        """A lease that two heartbeats in a row do not list is lost (one may have crossed it on the way)."""
        listed = set(heartbeat.leases)
        for lease in self.ledger.leases_of(server.peer):
            lease.missed_heartbeats = 0 if lease.ordinal in listed else lease.missed_heartbeats + 1
            if lease.missed_heartbeats >= 2:
                self.ledger.lose([lease.ordinal])
        self._count_leases(server)

    async def _lease(self) -> None:
        """Grants leases while pacing and credits allow, the least busy server first."""
        granted = True
        while granted:
            granted = False
            for server in self.servers.next_to_lease():
                assert server.version is not None
                if lease := self.ledger.grant(server.peer, server.version):
                    await self._send_lease(server, lease)
                    granted = True
                    break

    async def _send_lease(self, server: ServerState, lease: LeaseRecord) -> None:
        self._count_leases(server)
        self.status.epoch, row = place(self.config.seed, lease.ordinal, len(self.dataset))
        seeds = [
            request_seed(self.config.seed, lease.ordinal, sample, lease.redraw)
            for sample in range(self.config.rollout.group_size)
        ]
        kept = self.dataset[row]
        message = Lease(lease.ordinal, lease.redraw, seeds, kept.row)
        await self._send(server.peer, message, prompt_ids=kept.token_ids)

    def _count_leases(self, server: ServerState) -> None:
        server.count_leases(self.ledger.num_leases_of(server.peer), time.monotonic())

    async def _give_up(self, server: ServerState, reason: str) -> None:
        """A server is lost: its leases go to others."""
        lost = self.ledger.lose_server(server.peer)
        self.servers.leave(server.peer, time.monotonic())
        self.counts["servers_lost"] += 1
        self.status.note(f"lost rollout server {server.name}: {reason}; {len(lost)} groups are leased anew")
        await self._send(server.peer, Stop(reason))
        self.mailbox.forget(server.peer)
        await self._lease()

    # ---- learner ranks ---------------------------------------------------------------------------------

    async def _take_in_rank(self, peer: bytes, hello: RankHello) -> None:
        if hello.config_digest != self._digest or hello.num_ranks != self.config.learner.num_ranks:
            raise PeerLost(
                f"learner rank {hello.rank} has another configuration (digest {hello.config_digest}, "
                f"{hello.num_ranks} ranks) than the coordinator ({self._digest}, "
                f"{self.config.learner.num_ranks} ranks); start both with the same file and overrides"
            )
        self._ranks[hello.rank] = peer
        await self._send(peer, RankWelcome())

    async def _from_rank_0(self, peer: bytes, received: Received) -> None:
        match received.body:
            case VersionAnnounced(version):
                self._learner_version = self.mailbox.limits.newest_version = version
                self._progress_s = time.monotonic()
                await self._send(peer, VersionRecorded(version))
                await self._form_batches()
            case VersionPublished() as published:
                self._offer = WeightsOffer(published.version, published.path, published.manifest)
                self.directory.append_spans("learner-0", published.spans)
                self.status.record_publish(published.version, published.spans)
                for server in self.servers.all():
                    await self._send(server.peer, self._offer)
            case StepReport() as report:
                self._record_step(report)
                if report.index + 1 == self.config.learner.max_versions:
                    self.ending.set()
        await self._lease()

    async def _form_batches(self) -> None:
        """Forms every batch that can form, and sends each rank its shard."""
        while (
            len(self._ranks) == self.config.learner.num_ranks
            and self.ledger.num_batches_formed < self.config.learner.max_versions
            and can_form_batch(
                num_batches_formed=self.ledger.num_batches_formed, learner_version=self._learner_version
            )
        ):
            index = self.ledger.num_batches_formed
            groups = self.ledger.form_batch()
            if groups is None:
                return
            masked = [
                mask_group(
                    group,
                    batch_index=index,
                    max_staleness=self.config.max_staleness,
                    over_age=self.ledger.over_age,
                )
                for group in groups
            ]
            await self._send_batch(index, masked)

    async def _send_batch(self, index: int, masked: list[MaskedGroup]) -> None:
        groups = [m.group for m in masked]
        plan = plan_batch(
            index,
            groups,
            num_ranks=self.config.learner.num_ranks,
            max_tokens=self.config.learner.max_tokens_per_microbatch,
        )
        self._formed[index] = batch_metrics(plan, masked), groups
        for rank, peer in self._ranks.items():
            mine = [groups[p] for microbatch in plan.microbatches[rank] for p in microbatch]
            await self._send(peer, Batch(plan, rank, [group_fields(g) for g in mine]), groups=mine)

    def _record_step(self, report: StepReport) -> None:
        now_s = time.monotonic()
        of_batch, groups = self._formed.pop(report.index)
        step_s, self._step_s = now_s - self._step_s, now_s
        num_tokens = sum(g.num_tokens for g in groups)
        metrics = {
            "training/global_step": float(report.index + 1),
            "training/policy_version": float(report.index + 1),
            "training/epoch": float(self.status.epoch),
            **of_batch,
            **report.metrics,
            "timing_s/step": step_s,
            "timing_s/gen": _mean_duration_s(groups, "generate"),
            "perf/throughput": num_tokens / step_s / (self.config.learner.num_ranks + len(self.servers)),
            "perf/total_num_tokens": float(num_tokens),
            "rollout/tokens_per_s": self._tokens_since_step / step_s,
            "rollout/in_flight": float(self.ledger.num_leased),
            "rollout/servers": float(len(self.servers)),
            "idle/learner": report.metrics.get("timing_s/wait", 0.0) / step_s,
            "idle/rollout": self.servers.idle_share(now_s),
            **self.status.weight_sync_metrics(),
            **{f"counts/{name}": float(n) for name, n in (self.counts + self.ledger.counts).items()},
        }
        self._tokens_since_step = 0
        self._progress_s = now_s
        self.directory.append_spans("learner-0", report.spans)
        self.directory.append_metrics(metrics)
        limit = self.config.run.trajectories_per_version
        self.directory.write_trajectories(report.index + 1, groups, None if limit == "all" else limit)
        self.status.record_version(report.index + 1, metrics)

    # ---- both ------------------------------------------------------------------------------------------

    async def _send(
        self,
        peer: bytes,
        message: AnyMessage,
        *,
        groups: Sequence[TrajectoryGroup] = (),
        prompt_ids: Int32 | None = None,
    ) -> None:
        """Sends, or leaves a peer that is gone to the deadlines, which give it up with their reason."""
        try:
            await self.mailbox.send(peer, message, groups, prompt_ids)
        except PeerLost as error:
            self.counts["sends_failed"] += 1
            if peer in self.servers:
                self.servers[peer].last_heard_s = float("-inf")
            elif peer in self._ranks.values() and not self.ending.is_set():
                raise PeerLost(f"a learner rank is gone: {error}") from error

    async def _refuse(self, peer: bytes, error: WireError) -> None:
        """Counts a message that breaks the schema; a server that keeps sending them is given up."""
        self.counts["messages_refused"] += 1
        self.status.note(f"refused a message: {error}")
        if peer not in self.servers:
            return
        server = self.servers[peer]
        server.num_refused += 1
        if server.num_refused >= MAX_REFUSED_IN_A_ROW:
            await self._give_up(server, f"{server.num_refused} refused messages in a row, the last: {error}")

    async def _let_go(self, peer: bytes) -> None:
        if peer in self.servers:
            server = self.servers.leave(peer, time.monotonic())
            lost = self.ledger.lose_server(peer)
            self.mailbox.forget(peer)
            if not self.ending.is_set():
                self.status.note(f"rollout server {server.name} left; {len(lost)} groups are leased anew")
                await self._lease()
        self._ranks = {rank: p for rank, p in self._ranks.items() if p != peer}
        if not self._ranks and not len(self.servers):
            self._departed.set()

    async def _keep_deadlines(self) -> None:
        """Gives up silent and stalled servers, and ends a run in which nothing moves."""
        while True:
            await asyncio.sleep(self.config.timeouts.heartbeat_s / 3)
            now_s = time.monotonic()
            for server in self.servers.silent(now_s):
                await self._give_up(
                    server, f"silent for timeouts.heartbeat_s = {self.config.timeouts.heartbeat_s:g} s"
                )
            for server in self.servers.stalled(now_s):
                await self._give_up(
                    server, f"no engine step for timeouts.lease_s = {self.config.timeouts.lease_s:g} s"
                )
            self._check_progress(now_s)

    def _check_progress(self, now_s: float) -> None:
        timeouts = self.config.timeouts
        if self._learner_version < 0 and now_s - self._started_s > timeouts.learner_start_s:
            raise PeerLost(
                f"{len(self._ranks)} of {self.config.learner.num_ranks} learner ranks came and no version was "
                f"published within timeouts.learner_start_s = {timeouts.learner_start_s:g} s"
            )
        if not len(self.servers) and now_s - self._progress_s > timeouts.engine_start_s:
            raise PeerLost(
                f"no rollout server for timeouts.engine_start_s = {timeouts.engine_start_s:g} s; "
                f"start one with: asyncrl rollout-server CONFIG --connect {self.mailbox.address}"
            )
        if now_s - self._progress_s > timeouts.idle_s:
            raise PeerLost(
                f"no version for timeouts.idle_s = {timeouts.idle_s:g} s: learner at {self._learner_version}, "
                f"{self.ledger.num_batches_formed} batches formed, {self.ledger.num_leased} groups leased, "
                f"{self.ledger.num_finished} finished, {len(self.servers)} servers at "
                f"{[s.version for s in self.servers.all()]}"
            )

    async def _say_goodbye(self) -> None:
        """Ends the run: everyone is told, and has `timeouts.shutdown_s` (the learner exports) to leave."""
        self.status.phase = "ending"
        await self.stop_peers("")
        if not self._ranks and not len(self.servers):
            return
        limit_s = self.config.timeouts.shutdown_s + self.config.timeouts.collective_s
        try:
            async with asyncio.timeout(limit_s):
                await self._departed.wait()
        except TimeoutError:
            raise PeerLost(
                f"{len(self._ranks)} learner ranks and {len(self.servers)} servers did not leave within "
                f"{limit_s:g} s of the end of training"
            ) from None


def _mean_duration_s(groups: list[TrajectoryGroup], name: str) -> float:
    spans: list[Span] = [span for group in groups for span in group.spans if span.name == name]
    return sum(span.end_s - span.start_s for span in spans) / len(spans) if spans else 0.0
