"""A learner rank: receives its shard of every batch, trains it, and (rank 0 speaking) publishes the version.

    consumes              does                                                        produces
    Batch                 update: forward, backward, steps, all-reduced metrics       StepReport
    (a trained batch)     check, announce, write the snapshot, then a checkpoint      VersionAnnounced, -Published
    VersionRecorded       lets the snapshot be written                                -
    Stop                  leaves                                                      Bye

ZeroMQ's own thread receives the next shard while this one computes; collectives are issued by the main
thread only. It ends after `learner.max_versions`, or with the first cause: a lost coordinator, a lost rank.
"""

from __future__ import annotations

import resource
import time
from collections import deque
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from asyncrl.checkpoint_folder import begin, is_due, partial_folder
from asyncrl.config import Config
from asyncrl.errors import PeerLost
from asyncrl.learner.mfu import peak_flops_per_s
from asyncrl.learner.publish import SnapshotPublisher
from asyncrl.learner.update import PolicyLearner
from asyncrl.stream.codec import Received
from asyncrl.stream.connections import BlockingConnection
from asyncrl.stream.messages import (
    AnyMessage,
    Batch,
    Bye,
    Heartbeat,
    StepReport,
    Stop,
    VersionAnnounced,
    VersionPublished,
    VersionRecorded,
)
from asyncrl.types import Shard, Span


def max_memory_gb() -> float:
    """The most that this rank has used so far: of its GPU, or of the host when it has none. GB."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


Kind = TypeVar("Kind", Batch, VersionRecorded)


class LearnerLoop:
    """The life of one rank, once it is welcome. Call `run` from the main thread."""

    def __init__(
        self,
        config: Config,
        learner: PolicyLearner,
        connection: BlockingConnection,
        publisher: SnapshotPublisher,
        run_directory: Path,
        *,
        first_version: int = 0,
    ) -> None:
        """`run_directory`: where checkpoints are written. `first_version`: above 0 for a learner that was loaded."""
        self._config = config
        self._learner = learner
        self._connection = connection
        self._publisher = publisher
        self._run_directory = run_directory
        self._first_version = first_version
        self._speaks = dist.get_rank() == 0
        self._model_flops = learner.model_flops
        self._peak_flops_per_s = (
            peak_flops_per_s(torch.cuda.get_device_name()) if torch.cuda.is_initialized() else None
        )
        self._waiting: deque[Received] = deque()
        """Messages that came while another kind was awaited: the next batch arrives before it is needed."""

    def run(self) -> None:
        """Trains up to version `learner.max_versions`, publishing each; the last only where it is evaluated."""
        self._publish(self._first_version)
        num_versions = self._config.learner.max_versions
        for index in range(self._first_version, num_versions):
            self._train(index, publish=index + 1 < num_versions or self._config.eval.every > 0)

    def say_goodbye(self) -> None:
        """The last snapshot may be unlinked then: where it is evaluated, only after the coordinator's Stop."""
        if self._config.eval.every:
            self._wait_for_stop()
        self._connection.send(Bye())

    def _wait_for_stop(self) -> None:
        limit_s = 3 * self._config.timeouts.eval_s
        try:
            body = self._connection.recv(limit_s).body
            while not isinstance(body, Stop):  # nothing else is of use after the last version
                body = self._connection.recv(limit_s).body
        except TimeoutError:  # the coordinator itself cuts an evaluation after twice that
            raise PeerLost(
                f"the coordinator did not end the run for {limit_s:g} s (3 x timeouts.eval_s) after the last version"
            ) from None
        if body.error:
            raise PeerLost(f"the coordinator ended the run: {body.error}")

    def _train(self, index: int, *, publish: bool) -> None:
        start_s = time.monotonic()
        shard = self._next_shard(index)
        received_s = time.monotonic()
        metrics = self._learner.update(shard)
        updated_s = time.monotonic()
        if publish:
            self._publish(index + 1)
        else:  # the last, which is exported all the same
            self._learner.check_finite()
        published_s = time.monotonic()
        is_saved = is_due(index + 1, self._config.checkpoint.every)
        if is_saved:
            self._save(index + 1)
        saved_s = time.monotonic()
        if self._speaks:
            version = {"version": index}
            timing = {
                **self._utilisation(shard, metrics),
                "timing_s/wait": received_s - start_s,
                "timing_s/update_weights": published_s - updated_s,
                "perf/max_memory_allocated_gb": max_memory_gb(),
            }
            spans = [Span("wait", start_s, received_s, version), Span("step", received_s, updated_s, version)]
            if is_saved:
                timing["timing_s/checkpoint"] = saved_s - published_s
                spans.append(Span("checkpoint", published_s, saved_s, {"version": index + 1}))
            self._connection.send(StepReport(index, metrics | timing, spans))

    def _save(self, version: int) -> None:
        """This rank's part of a checkpoint; the report that follows tells the coordinator that all are on disk."""
        folder = partial_folder(self._run_directory, version)
        if self._speaks:
            begin(folder)
        dist.barrier()
        self._learner.save(folder, version)
        dist.barrier()

    def _utilisation(self, shard: Shard, metrics: dict[str, float]) -> dict[str, float]:
        """perf/mfu/actor of this rank, on a device whose peak is known, of a version that took all of its steps."""
        update_s = metrics.get("timing_s/update_actor", 0.0)
        if self._peak_flops_per_s is None or not update_s or metrics.get("actor/early_stopped"):
            return {}
        trained = [
            (g, t) for g in shard.groups for t in g.trajectories if t.loss_mask.any()
        ]  # others are not packed
        lengths = [len(g.prompt_ids) + len(t) for g, t in trained]
        flops = self._model_flops.count(lengths) * shard.plan.num_epochs
        flops /= self._config.learner.tensor_parallel_size  # the ranks of a tensor group share them
        return {"perf/mfu/actor": flops / update_s / self._peak_flops_per_s}

    def _next_shard(self, index: int) -> Shard:
        received, batch = self._wait_for(Batch)
        if batch.plan.index != index:
            raise PeerLost(f"the coordinator sent batch {batch.plan.index} where batch {index} was due")
        return Shard(batch.plan, batch.rank, received.groups)

    def _publish(self, version: int) -> None:
        self._learner.check_finite()
        if self._speaks:
            self._connection.send(VersionAnnounced(version))
            _, recorded = self._wait_for(VersionRecorded)
            if recorded.version != version:
                raise PeerLost(f"version {recorded.version} was recorded where {version} was announced")
        path, manifest, spans = self._publisher.write(version)
        if self._speaks:
            self._connection.send(VersionPublished(version, path, manifest.encode(), spans))

    def _wait_for(self, kind: type[Kind]) -> tuple[Received, Kind]:
        """The next message of a kind; others wait their turn. Stop and a lost coordinator are raised."""
        for received in self._waiting:
            if isinstance(received.body, kind):
                self._waiting.remove(received)
                return received, received.body
        while True:
            try:
                received = self._connection.recv(self._config.timeouts.idle_s)
            except TimeoutError:  # it sends heartbeats for as long as it works
                raise PeerLost(
                    f"the coordinator is silent for timeouts.idle_s = {self._config.timeouts.idle_s:g} s"
                ) from None
            body: AnyMessage = received.body
            if isinstance(body, kind):
                return received, body
            if isinstance(body, Heartbeat):
                continue
            if isinstance(body, Stop):
                raise PeerLost(f"the coordinator ended the run: {body.error or 'no version was missing'}")
            self._waiting.append(received)
