"""The coordinator's side towards the learner: its ranks, its versions, the batches they get, their reports."""

from __future__ import annotations

from dataclasses import replace

from asyncrl.config import Config, shared_digest
from asyncrl.config.advantages import ComponentAdvantages
from asyncrl.coordinator.batches import MaskedGroup, batch_metrics, mask_group, plan_batch
from asyncrl.coordinator.ledger import Ledger
from asyncrl.coordinator.mailbox import Mailbox
from asyncrl.coordinator.staleness import can_form_batch
from asyncrl.coordinator.status import RunStatus
from asyncrl.envs.dataset import Dataset
from asyncrl.envs.order import DataOrder
from asyncrl.envs.rewards import reward_labels
from asyncrl.envs.rows import answer_of
from asyncrl.errors import PeerLost
from asyncrl.run_directory import PromptText, RunDirectory
from asyncrl.stream.codec import group_fields
from asyncrl.stream.messages import (
    Batch,
    Heartbeat,
    RankHello,
    RankWelcome,
    StepReport,
    Stop,
    VersionAnnounced,
    VersionPublished,
    VersionRecorded,
    WeightsOffer,
)
from asyncrl.types import TrajectoryGroup


class LearnerSide:
    """Owns the learner's version and the batches that were formed and not yet reported."""

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        order: DataOrder,
        mailbox: Mailbox,
        ledger: Ledger,
        status: RunStatus,
        directory: RunDirectory,
        *,
        hidden_size: int,
    ) -> None:
        self.ranks: dict[int, bytes] = {}
        self.version = -1
        """Newest announced version; -1 before the first."""
        self.published_version = -1
        """Newest finished version."""
        self._unrecorded: VersionAnnounced | None = None
        self._announced_s = 0.0
        self._config = config
        self._dataset = dataset
        self._order = order
        self._mailbox = mailbox
        self._ledger = ledger
        self._status = status
        self._directory = directory
        self._hidden_size = hidden_size
        algorithm = config.algorithm
        self._shuffles = "shuffle" in algorithm.stages
        self._learns_nothing_from_equal_rewards = algorithm.learns_nothing_from_equal_rewards
        reads_components = isinstance(algorithm.advantages, ComponentAdvantages)
        self._components = reward_labels([r.name for r in config.reward]) if reads_components else []
        self._formed: dict[int, tuple[dict[str, float], list[TrajectoryGroup]]] = {}
        self._num_untrainable_written = 0
        """Trajectories since the newest version was announced."""

    async def take_in(self, peer: bytes, hello: RankHello) -> None:
        """Welcomes a rank. Raises PeerLost when its configuration is another one."""
        digest, num_ranks = shared_digest(self._config), self._config.learner.num_ranks
        if hello.config_digest != digest or hello.num_ranks != num_ranks:
            raise PeerLost(
                f"learner rank {hello.rank} has another configuration (digest {hello.config_digest}, "
                f"{hello.num_ranks} ranks) than the coordinator ({digest}, {num_ranks} ranks); start both "
                "with the same file and overrides"
            )
        self.ranks[hello.rank] = peer
        await self._mailbox.send(peer, RankWelcome())

    def rank_of(self, peer: bytes) -> int | None:
        return next((rank for rank, known in self.ranks.items() if known == peer), None)

    def announced(self, announced: VersionAnnounced, now_s: float) -> None:
        """Known before any server can have committed it: no token comes from the future."""
        self.version = self._mailbox.limits.newest_version = announced.version
        self._unrecorded = announced
        self._announced_s = now_s
        self._num_untrainable_written = 0

    async def record(self, now_s: float, *, snapshot_is_needed: bool) -> None:
        """Lets the announced version be written, after which the snapshot before it is unlinked.

        While that snapshot is needed rank 0 waits, and the other ranks in a collective: for half of its timeout at
        most.
        """
        limit_s = self._config.timeouts.collective_s / 2
        if self._unrecorded is None or (snapshot_is_needed and now_s - self._announced_s < limit_s):
            return
        recorded = VersionRecorded(self._unrecorded.version)
        self._unrecorded = None
        await self._mailbox.send(self.ranks[0], recorded)

    def published(self, published: VersionPublished) -> WeightsOffer:
        """What the servers are offered."""
        self.published_version = published.version
        self._directory.append_spans("learner-0", published.spans)
        self._status.record_publish(published.version, published.spans)
        return WeightsOffer(published.version, published.path, published.manifest)

    async def form_batches(self) -> None:
        """Forms every batch that can form, and sends each rank its shard."""
        learner = self._config.learner
        while (
            len(self.ranks) == learner.num_ranks
            and self._ledger.num_batches_formed < learner.max_versions
            and can_form_batch(
                num_batches_formed=self._ledger.num_batches_formed, learner_version=self.version
            )
        ):
            index = self._ledger.num_batches_formed
            groups = self._ledger.form_batch()
            if groups is None:
                return
            await self._send_batch(index, [self._mask(index, group) for group in groups])

    def reported(self, report: StepReport, of_servers: dict[str, float]) -> bool:
        """Writes the version's metrics and trajectories. Returns whether it was the last version."""
        of_batch, groups = self._formed.pop(report.index)
        version = report.index + 1
        step_s = self._status.seconds_since_version()
        # verl's way: every trajectory with its prompt, over all devices, the learner's and the servers'.
        num_tokens = sum(len(g.prompt_ids) + len(t) for g in groups for t in g.trajectories)
        rollout = self._config.rollout
        num_devices = (
            self._config.learner.num_ranks + rollout.tensor_parallel_size * of_servers["rollout/servers"]
        )
        metrics = {
            "training/global_step": float(version),
            "training/policy_version": float(version),
            "training/epoch": float(self._order.epoch(max(group.ordinal for group in groups))),
            **of_batch,
            **report.metrics,
            "timing_s/step": step_s,
            "timing_s/gen": _mean_generation_s(groups),
            "perf/throughput": num_tokens / step_s / num_devices,
            "perf/total_num_tokens": float(num_tokens),
            # The wait may have begun before the clock of the first version: while the engine started.
            "idle/learner": min(1.0, report.metrics["timing_s/wait"] / step_s),
            **of_servers,
            **self._status.weight_sync_metrics(),
            **{f"counts/{name}": float(n) for name, n in self._status.counts.items()},
            **{f"counts/{name}": float(n) for name, n in self._ledger.counts.items()},
        }
        self._directory.append_spans("learner-0", report.spans)
        self._directory.append_metrics(metrics)
        limit = self._config.run.trajectories_per_version
        prompts = [self._prompt_text(group.ordinal) for group in groups]
        self._directory.write_trajectories(version, groups, prompts, None if limit == "all" else limit)
        self._status.record_version(version, metrics)
        return version == self._config.learner.max_versions

    def write_untrainable(self) -> None:
        """Groups that were consumed without training are looked at when something goes wrong: they are kept too.

        From one version to the next the first to come, as many trajectories as a version trains and its own file
        has; a filter may leave out many times that. The others are counted.
        """
        groups = self._ledger.take_untrainable()
        room = self._max_untrainable_written - self._num_untrainable_written
        num_trajectories = sum(len(group.trajectories) for group in groups)
        if groups and room > 0:
            prompts = [self._prompt_text(group.ordinal) for group in groups]
            self._directory.append_untrainable(groups, prompts, room)
            self._num_untrainable_written += min(room, num_trajectories)
        if (num_left_out := num_trajectories - room) > 0:
            if self._max_untrainable_written and "untrainable_not_written" not in self._status.counts:
                self._status.note(
                    f"trajectories/untrainable.jsonl has the first {self._max_untrainable_written} trajectories of a "
                    "version that nothing is trained on; counts/untrainable_not_written counts the others"
                )
            self._status.counts["untrainable_not_written"] += num_left_out

    @property
    def _max_untrainable_written(self) -> int:
        limit = self._config.run.trajectories_per_version
        trained = self._config.learner.prompts_per_batch * self._config.rollouts_per_group
        return trained if limit == "all" else min(limit, trained)

    @property
    def untrained(self) -> list[int]:
        """Ordinals in batches whose report has not come."""
        return [group.ordinal for _, groups in self._formed.values() for group in groups]

    async def send_heartbeats(self) -> None:
        """A rank that waits for a batch knows by them that the coordinator works."""
        for peer in list(self.ranks.values()):
            await self._mailbox.tell(peer, Heartbeat())

    def let_go(self, peer: bytes) -> None:
        """The rank said Bye."""
        self.ranks = {rank: p for rank, p in self.ranks.items() if p != peer}
        self._mailbox.forget(peer)

    async def stop_all(self, error: str) -> None:
        for peer in self.ranks.values():
            await self._mailbox.tell(peer, Stop(error))

    def _prompt_text(self, ordinal: int) -> PromptText:
        _, row = self._order.place(ordinal)
        kept = self._dataset[row]
        return PromptText(kept.text, answer_of(kept.row, self._config.data))

    def _mask(self, index: int, group: TrajectoryGroup) -> MaskedGroup:
        return mask_group(
            group,
            batch_index=index,
            max_staleness=self._config.max_staleness,
            over_age=self._ledger.over_age,
        )

    async def _send_batch(self, index: int, masked: list[MaskedGroup]) -> None:
        groups = [m.group for m in masked]
        learner = self._config.learner
        plan = plan_batch(
            index,
            groups,
            num_ranks=learner.num_data_ranks,
            max_tokens=learner.max_tokens_per_microbatch,
            num_minibatches=learner.minibatches,
            num_epochs=learner.epochs,
            hidden_size=self._hidden_size,
            shuffle_seed=self._config.seed if self._shuffles else None,
            components=self._components,
            num_greedy=self._config.num_greedy,
            num_aged_out=[m.num_aged_out for m in masked],
        )
        metrics = batch_metrics(plan, masked)
        are_equal = metrics["rollout/equal_reward_groups"] == len(groups)
        if are_equal and self._learns_nothing_from_equal_rewards:
            self._count_useless_batch(index)
        self._formed[index] = metrics, groups
        for rank, peer in self.ranks.items():
            data_rank = learner.data_rank(rank)
            mine = [_without_text(groups[p]) for p in plan.positions_of(data_rank)]
            await self._mailbox.send(
                peer, Batch(plan, data_rank, [group_fields(g) for g in mine]), groups=mine
            )

    def _count_useless_batch(self, index: int) -> None:
        """A batch that teaches nothing is shown as well as counted: the 1st, the 10th, the 100th ..."""
        self._status.counts["batches_equal_rewards"] += 1
        count = self._status.counts["batches_equal_rewards"]
        if str(count).strip("0") == "1":
            self._status.note(
                f"version {index + 1} learns nothing ({count} so far): in every group of its batch the rewards are "
                f"equal; trajectories/version_{index + 1:06d}.jsonl shows what was scored"
            )


def _without_text(group: TrajectoryGroup) -> TrajectoryGroup:
    """The ranks train on token ids; text and spans stay here."""
    return replace(group, trajectories=[replace(t, text="", detail="") for t in group.trajectories], spans=[])


def _mean_generation_s(groups: list[TrajectoryGroup]) -> float:
    spans = [span for group in groups for span in group.spans if span.name == "generate"]
    return sum(span.end_s - span.start_s for span in spans) / len(spans) if spans else 0.0
