"""Scripted peers in place of engines and learner, for a run of scripted_run.py.

`Server(run).serve()` is a rollout server that answers every lease at once, `learn(run)` a learner rank 0 that
publishes every version and trains nothing. What they see is noted in `run.log`, in the order in which they see
it, and `run.until(...)` waits for an entry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scripted_run import DEADLINE_S, Run

from asyncrl.checkpoint_folder import begin, is_due, partial_folder
from asyncrl.config import shared_digest
from asyncrl.errors import PeerLost
from asyncrl.stream.codec import Received, group_fields
from asyncrl.stream.connections import Connection
from asyncrl.stream.messages import (
    Batch,
    Bye,
    EvalFinished,
    EvalLease,
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
    VersionRefused,
    WeightsOffer,
)
from asyncrl.types import Status, Trajectory, TrajectoryGroup

TRAJECTORY_TOKENS = 2


def make_group(
    ordinal: int, prompt_ids: np.ndarray, *, version: int, reward: float | None = 1.0, num_samples: int = 2
) -> TrajectoryGroup:
    """Trajectories of TRAJECTORY_TOKENS tokens, all sampled by `version`; None is a reward that failed."""
    one = Trajectory(
        np.ones(TRAJECTORY_TOKENS, np.int32),
        np.ones(TRAJECTORY_TOKENS, np.uint8),
        np.full(TRAJECTORY_TOKENS, -0.5, np.float32),
        np.full(TRAJECTORY_TOKENS, version, np.int32),
        reward,
        Status.SCORED if reward is not None else Status.REWARD_FAILED,
        "stop",
        text="7",
        detail="" if reward is not None else "KeyError: 'answer'",
    )
    return TrajectoryGroup(ordinal, 0, prompt_ids, [one] * num_samples)


async def say_hello(peer: Connection, hello: ServerHello | RankHello) -> None:
    """The welcome tells a peer the run and the incarnation, which everything it sends later must carry."""
    await peer.send(hello)
    assert isinstance((await peer.recv()).body, ServerWelcome | RankWelcome)


class Left(Exception):
    """A scripted server has ended."""


@dataclass
class Server:
    """A scripted rollout server. It notes offers, commits and leases; `before_*` may hold it up."""

    run: Run
    name: str = "server"
    reward: Callable[[int], float | None] = lambda ordinal: 1.0
    """Of a training group."""
    roll_out: Callable[[Lease, np.ndarray, int], TrajectoryGroup] | None = None
    """(lease, prompt_ids, version) -> the group, instead of one by `reward`."""
    before_commit: Callable[[int], Awaitable[object]] | None = None
    before_eval: Callable[[int, int], Awaitable[object]] | None = None
    refuses: int | None = None
    """A version whose snapshot it does not find."""
    sampled_by: Callable[[int], int] = lambda version: version
    """What labels the tokens of an evaluation."""
    leases_before_silence: int | None = None
    """It answers nothing more, not even by heartbeats, from this lease on."""
    says_bye: bool = True
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: it fails."""
    ordinals: list[int] = field(default_factory=list)
    """What it was leased for training."""

    async def serve(self) -> list[int]:
        """Returns its ordinals once it was told to stop, or was made to fail."""
        async with self.run.connect(self.name) as self.connection:
            await say_hello(self.connection, ServerHello(shared_digest(self.run.config), 4, 1 << 20))
            await self.run.note(self.name, "up")
            self.version = -1
            self.eval_leases: set[tuple[int, int]] = set()
            try:
                async with asyncio.TaskGroup() as self.tasks:
                    self.heart = self.tasks.create_task(self._beat())
                    self.tasks.create_task(self._fail_when_told())
                    self.tasks.create_task(self._take())
            except* Left:
                pass
            except* PeerLost as lost:
                raise lost.exceptions[0] from None
        return self.ordinals

    async def _take(self) -> None:
        while True:
            received = await self.connection.recv()
            match received.body:
                case WeightsOffer() as offer:
                    await self.run.note(self.name, "offer", offer.version)
                    if offer.version == self.refuses:
                        await self.connection.send(VersionRefused(offer.version, "its file is gone"))
                    else:
                        self.tasks.create_task(self._commit(offer.version))
                case Lease() as lease:
                    await self._roll_out(lease, received)
                case EvalLease() as lease:
                    self.tasks.create_task(self._evaluate(lease, received))
                case Stop(""):
                    if self.says_bye:
                        await self.connection.send(Bye())
                    raise Left
                case Stop(error):
                    raise PeerLost(error)
                case _:
                    pass

    async def _commit(self, version: int) -> None:
        if self.before_commit is not None:
            await self.before_commit(version)
        self.version = version
        await self.run.note(self.name, "commit", version)
        await self.connection.send(VersionCommitted(version))

    async def _roll_out(self, lease: Lease, received: Received) -> None:
        self.ordinals.append(lease.ordinal)
        await self.run.note(self.name, "lease", lease.ordinal)
        if self.leases_before_silence is not None and len(self.ordinals) >= self.leases_before_silence:
            self.heart.cancel()
            await asyncio.sleep(DEADLINE_S)
        assert received.prompt_ids is not None
        if self.roll_out is not None:
            made = self.roll_out(lease, received.prompt_ids, self.version)
        else:
            reward = self.reward(lease.ordinal)
            made = make_group(lease.ordinal, received.prompt_ids, version=self.version, reward=reward)
        await self.connection.send(GroupFinished(group_fields(made)), groups=[made])

    async def _evaluate(self, lease: EvalLease, received: Received) -> None:
        """The reward grows with the version: of version v the first 2 + v rows are right."""
        self.eval_leases.add((lease.version, lease.row_index))
        await self.run.note(self.name, "eval", lease.version, lease.row_index)
        if self.before_eval is not None:
            await self.before_eval(lease.version, lease.row_index)
        assert received.prompt_ids is not None
        made = make_group(
            lease.row_index,
            received.prompt_ids,
            version=self.sampled_by(self.version),
            reward=float(lease.row_index < 2 + lease.version),
            num_samples=len(lease.seeds),
        )
        await self.connection.send(EvalFinished(lease.version, group_fields(made)), groups=[made])
        self.eval_leases.discard((lease.version, lease.row_index))

    async def _beat(self) -> None:
        while True:
            await self.connection.send(Heartbeat([], len(self.run.log), "idle", sorted(self.eval_leases)))
            await asyncio.sleep(0.3)

    async def _fail_when_told(self) -> None:
        await self.stop.wait()
        await self.connection.send(Failed("the engine core is dead", ""))
        raise Left


async def learn(
    run: Run,
    *,
    batches: list[Batch] | None = None,
    before_train: Callable[[int], Awaitable[object]] | None = None,
    fail_at: int | None = None,
    before_bye: Callable[[], Awaitable[object]] | None = None,
) -> None:
    """A scripted learner rank 0. Like the real one it publishes the last version only to be evaluated, and begins the
    checkpoints that are due, with nothing in them.

    `batches` gets what it receives; `fail_at`: the batch at which it fails.
    """
    async with run.connect("learner-0") as rank:
        waiting: list[Any] = []

        async def wait_for(kind: type) -> Any:
            for body in waiting:
                if isinstance(body, kind):
                    waiting.remove(body)
                    return body
            while True:
                body = (await rank.recv()).body
                if isinstance(body, kind):
                    return body
                if isinstance(body, Stop):
                    raise PeerLost(body.error)
                waiting.append(body)

        async def publish(version: int) -> None:
            await run.note("announce", version)
            await rank.send(VersionAnnounced(version))
            await wait_for(VersionRecorded)
            await run.note("recorded", version)
            await rank.send(VersionPublished(version, "/nowhere", b"{}"))

        await say_hello(rank, RankHello(shared_digest(run.config), 0, 1))
        first_version = run.coordinator.status.first_version
        await publish(first_version)
        max_versions = run.config.learner.max_versions
        for index in range(first_version, max_versions):
            if before_train is not None:
                await before_train(index)
            batch = await wait_for(Batch)
            if batches is not None:
                batches.append(batch)
            if fail_at == index:
                await rank.send(Failed("the gradient of layer 3 is NaN", "Traceback: ..."))
                return
            if index + 1 < max_versions or run.config.eval.every:
                await publish(index + 1)
            if is_due(index + 1, run.config.checkpoint.every):
                begin(partial_folder(run.path, index + 1))
            timing = {"timing_s/wait": 0.0, "timing_s/update_actor": 0.0, "timing_s/update_weights": 0.0}
            await rank.send(StepReport(index, timing))
            await run.note("reported", index)
        await wait_for(Stop)
        await run.note("learner stops")
        if before_bye is not None:
            await before_bye()
        await rank.send(Bye())
