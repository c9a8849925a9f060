"""The coordinator: owns the data order, the leases, the staleness rule and the batches. Never a model.

One asyncio object in one light process without torch; tests run it in theirs. After every message it forms
the batches that can form and leases what may be leased: both are safe to ask for at any time.

    consumes                           does                                      produces
    GroupFinished    (servers)         takes it into the ledger                  Acknowledged, Batch (ranks)
    VersionAnnounced (rank 0)          records it: the learner's version         VersionRecorded
    VersionPublished (rank 0)          offers it to every server                 WeightsOffer
    VersionCommitted (servers)         the version the server may lease for      Lease, EvalLease
    EvalFinished     (servers)         the evaluation's numbers when it is done  a line of evaluations.jsonl
    Heartbeat, Hello, Bye, silence     takes in, keeps or gives up a server      ServerWelcome, Stop
    StepReport       (rank 0)          one line of metrics.jsonl, a checkpoint   Stop after the last version

It waits on its one socket and on a clock for deadlines, and ends when `learner.max_versions` are trained, or
with the first cause of failure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

from asyncrl.config import Config
from asyncrl.coordinator.checkpoint import CheckpointWriter, CoordinatorState
from asyncrl.coordinator.eval_side import EvalSide
from asyncrl.coordinator.evaluation import Evaluations
from asyncrl.coordinator.learner_side import LearnerSide
from asyncrl.coordinator.ledger import Ledger
from asyncrl.coordinator.mailbox import Mailbox, Refusal
from asyncrl.coordinator.server_side import ServerSide
from asyncrl.coordinator.staleness import OverAge, Pacing
from asyncrl.coordinator.status import RunStatus
from asyncrl.envs.dataset import Dataset
from asyncrl.envs.eval_report import num_eval_prompts
from asyncrl.envs.order import DataOrder
from asyncrl.errors import PeerLost, WireError, first_cause, last_line
from asyncrl.run_directory import RunDirectory
from asyncrl.stream.codec import Received
from asyncrl.stream.envelope import SequenceGap
from asyncrl.stream.messages import (
    Bye,
    EvalFinished,
    Failed,
    RankHello,
    ServerHello,
    StepReport,
    Stop,
    VersionAnnounced,
    VersionPublished,
)


class Coordinator:
    """Serves one run, from the first Hello to the last Bye."""

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        mailbox: Mailbox,
        directory: RunDirectory,
        *,
        eval_dataset: Dataset | None = None,
        hidden_size: int = 1024,
        resumed: CoordinatorState | None = None,
        evaluated: Collection[int] = (),
    ) -> None:
        """`eval_dataset`: of data.eval; None where nothing is evaluated. `hidden_size`: of the model, by which the
        ranks' work is estimated. `resumed`: the checkpoint that the learner goes on from; `evaluated`: the versions
        that need no evaluation any more."""
        eval_dataset = Dataset(()) if eval_dataset is None else eval_dataset
        order = DataOrder(config.seed, dataset.sizes, dataset.weights)
        pacing = Pacing(config.learner.prompts_per_batch, config.max_staleness, config.learner.max_versions)
        first_version = 0 if resumed is None else resumed.version
        self.status = RunStatus(config.learner.max_versions, first_version)
        self.ending = asyncio.Event()
        """Set when the last version is trained, and evaluated: from then on peers may leave."""
        self._timeouts = config.timeouts
        self._num_ranks = config.learner.num_ranks
        self._mailbox = mailbox
        over_age: OverAge = "keep" if config.over_age == "keep" else "mask"  # the only two that are built
        self._ledger = Ledger(pacing, over_age)
        self._evaluations = Evaluations(
            config.eval,
            num_prompts=num_eval_prompts(len(eval_dataset), config),
            max_versions=config.learner.max_versions,
            done=evaluated,
        )
        self._server_side = ServerSide(
            config, dataset, order, mailbox, self._ledger, self._evaluations, self.status, directory
        )
        self._eval_side = EvalSide(
            config, eval_dataset, self._evaluations, self._server_side.send, self.status, directory
        )
        self._learner_side = LearnerSide(
            config, dataset, order, mailbox, self._ledger, self.status, directory, hidden_size=hidden_size
        )
        self._checkpoints = CheckpointWriter(
            config.checkpoint, dataset.sizes, self._ledger, self.status, directory
        )
        if resumed is not None:
            resumed.restore(self._ledger, self.status)
        self._is_trained = False
        """Whether the last version is."""
        self._departed = asyncio.Event()

    async def run(self) -> None:
        """Returns when every version is trained and every peer has left. Raises the first cause otherwise."""
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = [
                    tasks.create_task(self._serve()),
                    tasks.create_task(self._keep_deadlines()),
                    tasks.create_task(self._eval_side.report(self._end_if_done)),
                ]
                await self.ending.wait()
                # A task, so that the group's first exception is the first in time (errors.first_cause).
                await tasks.create_task(self._say_goodbye())
                for task in serving:
                    task.cancel()
        except BaseExceptionGroup as group:
            cause = first_cause(group)
            self._eval_side.end(f"the run failed: {last_line(cause)}")
            await self.stop_peers(last_line(cause))
            raise cause from None
        finally:
            self._eval_side.end("the run was ended")

    async def stop_peers(self, error: str) -> None:
        """Tells every peer that the run ends; an empty error is a normal end."""
        await self._learner_side.stop_all(error)
        await self._server_side.stop_all(error)

    async def _serve(self) -> None:
        while True:
            peer, received = await self._mailbox.recv()
            try:
                refusal = received if isinstance(received, Refusal) else None
                if not isinstance(received, Refusal):
                    await self._take(peer, received)
            except WireError as error:
                refusal = Refusal(error)
            if refusal is not None and isinstance(refusal.error, SequenceGap):
                await self._lost_messages(peer, refusal.error)
            elif refusal is not None:
                if peer in self._server_side.servers:
                    self._eval_side.refuse(refusal)
                await self._server_side.refuse(peer, refusal)
            await self._move_on()

    async def _move_on(self) -> None:
        """Everything that can be done now; safe to ask for at any time."""
        if self.ending.is_set():
            self._see_who_is_left()
            return
        now_s, servers = time.monotonic(), self._server_side.servers.all()
        if self._evaluations.live:
            if self._is_trained and not servers:
                self._evaluations.cut_all("every server has left")
            self._eval_side.look(self._learner_side.published_version, servers, now_s)
            await self._server_side.offer_newest()
        is_needed = self._evaluations.needs_snapshot(self._learner_side.published_version, servers)
        await self._learner_side.record(now_s, snapshot_is_needed=is_needed)
        await self._learner_side.form_batches()
        self._learner_side.write_untrainable()
        self._server_side.check_rewards()
        await self._server_side.lease()
        await self._eval_side.lease(servers)

    def _end_if_done(self) -> None:
        if self._is_trained and self._eval_side.is_done:
            self.ending.set()

    async def _take(self, peer: bytes, received: Received) -> None:
        servers, ranks = self._server_side.servers, self._learner_side.ranks
        match received.body:
            case ServerHello() if self.ending.is_set():
                await self._mailbox.tell(peer, Stop(""))
                self._mailbox.forget(peer)
            case ServerHello() as hello:
                await self._server_side.take_in(peer, received.header.sender, hello)
            case RankHello() as hello:
                await self._learner_side.take_in(peer, hello)
            case Failed() as failed if self._learner_side.rank_of(peer) is not None:
                raise PeerLost(f"{failed.traceback}\n{received.header.sender} failed: {failed.error}")
            case Bye():  # also of a process that was given up, or never taken in
                self._let_go(peer)
            case EvalFinished() if peer in servers:
                servers[peer].last_heard_s = time.monotonic()
                self._eval_side.take(servers[peer], received)
            case _ if peer in servers:
                servers[peer].last_heard_s = time.monotonic()
                await self._server_side.take(servers[peer], received)
            case VersionAnnounced() as announced if peer == ranks.get(0):
                self._learner_side.announced(announced, time.monotonic())
            case VersionPublished() as published if peer == ranks.get(0):
                self._evaluations.published(published.version, time.monotonic())
                await self._server_side.offer(self._learner_side.published(published))
            case StepReport() as report if peer == ranks.get(0):
                is_last = self._learner_side.reported(report, self._server_metrics())
                await self._checkpoints.reported(report.index + 1, self._learner_side.untrained)
                self._is_trained = is_last
                self._end_if_done()
            case body:
                await self._mailbox.tell(peer, Stop("the coordinator does not know this process (any more)"))
                self._mailbox.forget(peer)
                raise WireError(f"{received.header.sender} sent {type(body).__name__} out of turn")

    async def _lost_messages(self, peer: bytes, gap: SequenceGap) -> None:
        """What a peer said is missing, so what it believes is unknown: a server starts anew, a rank cannot."""
        if peer in self._server_side.servers:
            await self._server_side.give_up(self._server_side.servers[peer], str(gap))
        elif peer in self._learner_side.ranks.values():
            raise PeerLost(f"a learner rank's messages were lost: {gap}")
        else:
            self.status.counts["messages_refused"] += 1

    def _let_go(self, peer: bytes) -> None:
        if peer in self._server_side.servers:
            self._server_side.let_go(peer, expected=self.ending.is_set())
        else:
            self._learner_side.let_go(peer)

    def _see_who_is_left(self) -> None:
        if not self._learner_side.ranks and not len(self._server_side.servers):
            self._departed.set()

    def _server_metrics(self) -> dict[str, float]:
        tokens, self._server_side.num_new_tokens = self._server_side.num_new_tokens, 0
        return {
            "rollout/tokens_per_s": tokens / self.status.seconds_since_version(),
            "rollout/in_flight": float(self._ledger.num_leased),
            "rollout/servers": float(len(self._server_side.servers)),
            "idle/rollout": self._server_side.servers.idle_share(time.monotonic()),
        }

    async def _keep_deadlines(self) -> None:
        """Gives up silent and stalled servers, and ends a run in which nothing moves."""
        while True:
            await asyncio.sleep(self._timeouts.heartbeat_s / 3)
            await self._server_side.give_up_the_lost(time.monotonic())
            await self._learner_side.send_heartbeats()
            await self._move_on()
            if not self._is_trained:
                self._check_progress()

    def _check_progress(self) -> None:
        """Raises PeerLost when the learner, every server, or any progress at all is overdue."""
        timeouts, learner = self._timeouts, self._learner_side
        waited_s = self.status.seconds_since_progress()
        num_servers = len(self._server_side.servers)
        if learner.version < 0 and waited_s > timeouts.learner_start_s:
            raise PeerLost(
                f"{len(learner.ranks)} of {self._num_ranks} learner ranks came, and no version was published, "
                f"within timeouts.learner_start_s = {timeouts.learner_start_s:g} s"
            )
        alone_s = min(waited_s, time.monotonic() - self._server_side.servers.empty_since_s)
        # A server that cannot start its engine says why at engine_start_s: connect_s gives it time to.
        limit_s = timeouts.engine_start_s + timeouts.connect_s
        if not num_servers and alone_s > limit_s:
            raise PeerLost(
                f"no rollout server for {limit_s:g} s (timeouts.engine_start_s + connect_s); start one: "
                f"asyncrl rollout-server CONFIG --connect {self._mailbox.address}"
            )
        if self._evaluations.live and num_servers:
            self.status.record_progress()  # training may have to wait for them; they have a deadline of their own
        elif learner.version >= 0 and num_servers and waited_s > timeouts.idle_s:
            ledger = self._ledger
            raise PeerLost(
                f"no group, no version for timeouts.idle_s = {timeouts.idle_s:g} s: the learner is at "
                f"{learner.version}, {ledger.num_batches_formed} batches are formed, {ledger.num_leased} groups "
                f"leased, {ledger.num_finished} finished; {num_servers} servers are at "
                f"{[server.version for server in self._server_side.servers.all()]}"
            )

    async def _say_goodbye(self) -> None:
        """Everyone is told, and has time to leave: the learner may still be exporting the model."""
        self.status.phase = "ending"
        await self.stop_peers("")
        self._see_who_is_left()
        limit_s = self._timeouts.shutdown_s + self._timeouts.collective_s
        try:
            async with asyncio.timeout(limit_s):
                await self._departed.wait()
        except TimeoutError:
            raise PeerLost(
                f"{len(self._learner_side.ranks)} learner ranks and {len(self._server_side.servers)} rollout "
                f"servers did not leave within {limit_s:g} s of the last version"
            ) from None
