"""The coordinator over real sockets, with scripted peers in place of engine and learner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_dataset import dataset_of

from asyncrl.config import Config, load_config, shared_digest
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.mailbox import Mailbox
from asyncrl.envs.dataset import Dataset
from asyncrl.errors import PeerLost, RewardError
from asyncrl.run_directory import RunDirectory
from asyncrl.stream.codec import Limits, group_fields
from asyncrl.stream.connections import Connection
from asyncrl.stream.envelope import Envelope
from asyncrl.stream.messages import (
    Acknowledged,
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
from asyncrl.stream.sockets import Listener
from asyncrl.types import Status, Trajectory, TrajectoryGroup

VOCAB = 50
DEADLINE_S = 20.0


def make_config(tmp_path: Path, *overrides: str) -> Config:
    return load_config(
        None,
        [
            f"run.dir={tmp_path}",
            "run.name=test",
            "rollout.group_size=2",
            "learner.prompts_per_batch=2",
            "learner.max_versions=3",
            "timeouts.heartbeat_s=1.5",
            *overrides,
        ],
    )


def make_dataset() -> Dataset:
    rows = [{"prompt": f"<{i}>", "answer": str(i)} for i in range(10)]
    return dataset_of(rows, [np.array([i], np.int32) for i in range(10)])


def limits() -> Limits:
    return Limits(vocab_size=VOCAB, group_size=2, max_prompt_tokens=512, max_completion_tokens=8)


@dataclass
class Run:
    """A running coordinator and how to reach it."""

    config: Config
    coordinator: Coordinator
    address: str
    task: asyncio.Task[None]
    path: Path

    @asynccontextmanager
    async def connect(self, name: str) -> AsyncIterator[Connection]:
        envelope = Envelope(name, max_message_bytes=1 << 20)
        async with Connection(self.address, envelope, limits(), heartbeat_s=5.0, connect_s=5.0) as connection:
            yield connection


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[Run]:
    directory = RunDirectory.create(config)
    async with Listener("127.0.0.1", 0, max_message_bytes=1 << 20, heartbeat_s=5.0) as listener:
        known = limits()
        known.run, known.incarnation, known.newest_version = "test.1", "abc", -1
        mailbox = Mailbox(listener, known, max_message_bytes=1 << 20)
        coordinator = Coordinator(config, make_dataset(), mailbox, directory)
        task = asyncio.ensure_future(coordinator.run())
        try:
            yield Run(config, coordinator, listener.address, task, directory.path)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            directory.close()


def answer(lease: Lease, prompt_ids: np.ndarray, version: int, reward: float | None = 1.0) -> TrajectoryGroup:
    def one(length: int) -> Trajectory:
        return Trajectory(
            np.ones(length, np.int32),
            np.ones(length, np.uint8),
            np.full(length, -0.5, np.float32),
            np.full(length, version, np.int32),
            reward,
            Status.SCORED if reward is not None else Status.REWARD_FAILED,
            "stop",
            detail="" if reward is not None else "KeyError: 'answer'",
        )

    return TrajectoryGroup(lease.ordinal, lease.redraw, prompt_ids, [one(2), one(3)])


async def say_hello(connection: Connection, hello: ServerHello | RankHello) -> None:
    """The welcome tells a peer the run and the incarnation, which everything it sends later must carry."""
    await connection.send(hello)
    assert isinstance((await connection.recv()).body, ServerWelcome | RankWelcome)


async def serve(
    run: Run,
    name: str = "server",
    *,
    reward: Callable[[int], float | None] = lambda ordinal: 1.0,
    leases_before_silence: int | None = None,
    say_bye: bool = True,
) -> list[int]:
    """A scripted rollout server: commits every offer, answers every lease. Returns the ordinals leased."""
    ordinals: list[int] = []
    async with run.connect(name) as connection:
        await say_hello(connection, ServerHello(shared_digest(run.config), 4, 1 << 20))
        version = -1

        async def beat() -> None:
            while True:
                await connection.send(Heartbeat([], len(ordinals), "idle"))
                await asyncio.sleep(0.3)

        heart = asyncio.ensure_future(beat())
        try:
            while True:
                received = await connection.recv()
                match received.body:
                    case WeightsOffer() as offer:
                        version = offer.version
                        await connection.send(VersionCommitted(version))
                    case Lease() as lease:
                        ordinals.append(lease.ordinal)
                        if leases_before_silence is not None and len(ordinals) >= leases_before_silence:
                            heart.cancel()
                            await asyncio.sleep(DEADLINE_S)
                        assert received.prompt_ids is not None
                        group = answer(lease, received.prompt_ids, version, reward(lease.ordinal))
                        await connection.send(GroupFinished(group_fields(group)), groups=[group])
                    case Stop(""):
                        if say_bye:
                            await connection.send(Bye())
                        return ordinals
                    case Stop(error):
                        raise PeerLost(error)
                    case _:
                        pass
        finally:
            heart.cancel()


async def nothing() -> None:
    return None


async def learn(
    run: Run,
    *,
    batches: list[Batch] | None = None,
    fail_at: int | None = None,
    before_bye: Callable[[], Awaitable[object]] = nothing,
) -> None:
    """A scripted learner rank 0 that publishes every version but trains nothing."""
    async with run.connect("learner-0") as connection:
        waiting: list[Batch] = []

        async def wait_for(kind: type) -> object:
            if kind is Batch and waiting:
                return waiting.pop(0)
            while True:
                body = (await connection.recv()).body
                if isinstance(body, kind):
                    return body
                if isinstance(body, Batch):
                    waiting.append(body)
                if isinstance(body, Stop) and body.error:
                    raise PeerLost(body.error)

        async def publish(version: int) -> None:
            await connection.send(VersionAnnounced(version))
            await wait_for(VersionRecorded)
            await connection.send(VersionPublished(version, "/nowhere", b"{}"))

        await say_hello(connection, RankHello(shared_digest(run.config), 0, 1))
        await publish(0)
        for index in range(run.config.learner.max_versions):
            batch = await wait_for(Batch)
            assert isinstance(batch, Batch)
            if batches is not None:
                batches.append(batch)
            if fail_at == index:
                await connection.send(Failed("the gradient of layer 3 is NaN", "Traceback: ..."))
                return
            if index + 1 < run.config.learner.max_versions:
                await publish(index + 1)
            timing = {"timing_s/wait": 0.0, "timing_s/update_actor": 0.0, "timing_s/update_weights": 0.0}
            await connection.send(StepReport(index, timing))
        await wait_for(Stop)
        await before_bye()
        await connection.send(Bye())


def metrics_of(run: Run) -> list[dict[str, float]]:
    import json

    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def test_a_run_trains_every_version_and_lets_everyone_go(tmp_path: Path):
    async def scenario() -> None:
        async with running(make_config(tmp_path)) as run, asyncio.timeout(DEADLINE_S):
            batches: list[Batch] = []
            server = asyncio.ensure_future(serve(run))
            await learn(run, batches=batches)
            ordinals = await server
            await run.task
            assert [b.plan.index for b in batches] == [0, 1, 2]
            trained = [o for b in batches for o in b.plan.ordinals]
            assert trained == sorted(set(trained))
            assert set(trained) <= set(ordinals)
            lines = metrics_of(run)
            assert [m["training/policy_version"] for m in lines] == [1, 2, 3]
            assert all(m["critic/score/mean"] == 1.0 for m in lines)
            assert all(m["staleness/max"] <= 2 for m in lines)
            assert len(list((run.path / "trajectories").iterdir())) == 3

    asyncio.run(scenario())


def test_staleness_0_leases_nothing_before_the_version_is_committed(tmp_path: Path):
    # Mutation: pacing by the learner's version instead of the server's committed one.
    async def scenario() -> None:
        config = make_config(tmp_path, "max_staleness=0")
        async with running(config) as run, asyncio.timeout(DEADLINE_S):
            batches: list[Batch] = []
            server = asyncio.ensure_future(serve(run))
            await learn(run, batches=batches)
            await server
            await run.task
            assert [b.plan.ordinals for b in batches] == [[0, 1], [2, 3], [4, 5]]
            assert [m["staleness/max"] for m in metrics_of(run)] == [0, 0, 0]

    asyncio.run(scenario())


def test_a_silent_server_loses_its_leases_to_another_and_every_prompt_trains_once(tmp_path: Path):
    async def scenario() -> None:
        config = make_config(tmp_path, "max_staleness=0")
        async with running(config) as run, asyncio.timeout(DEADLINE_S):
            batches: list[Batch] = []
            learner = asyncio.ensure_future(learn(run, batches=batches))
            silent = asyncio.ensure_future(serve(run, "silent", leases_before_silence=1))
            await asyncio.sleep(0.5)
            server = asyncio.ensure_future(serve(run, "healthy"))
            await learner
            await server
            silent.cancel()
            await asyncio.gather(silent, return_exceptions=True)
            await run.task
            assert [b.plan.ordinals for b in batches] == [[0, 1], [2, 3], [4, 5]]
            assert metrics_of(run)[-1]["counts/servers_lost"] == 1
            assert any("silent for timeouts.heartbeat_s" in note for note in run.coordinator.status.notes)

    asyncio.run(scenario())


def test_groups_without_a_reward_are_replaced_and_counted(tmp_path: Path):
    # Mutation: a failed reward trained as 0.
    async def scenario() -> None:
        config = make_config(tmp_path, "max_staleness=0")
        async with running(config) as run, asyncio.timeout(DEADLINE_S):
            batches: list[Batch] = []
            server = asyncio.ensure_future(serve(run, reward=lambda o: None if o in (1, 4) else 1.0))
            await learn(run, batches=batches)
            await server
            await run.task
            assert [b.plan.ordinals for b in batches] == [[0, 2], [3, 5], [6, 7]]
            last = metrics_of(run)[-1]
            assert last["counts/groups_untrainable"] == 2
            assert last["counts/trajectories_reward_failed"] == 4

    asyncio.run(scenario())


def test_a_failed_peer_ends_the_run_with_its_own_words_and_stops_the_others(tmp_path: Path):
    async def scenario() -> None:
        async with running(make_config(tmp_path)) as run, asyncio.timeout(DEADLINE_S):
            server = asyncio.ensure_future(serve(run))
            await learn(run, fail_at=1)
            with pytest.raises(PeerLost, match=r"learner-0 failed: the gradient of layer 3 is NaN"):
                await run.task
            with pytest.raises(PeerLost, match="the gradient of layer 3 is NaN"):
                await server

    asyncio.run(scenario())


def test_a_server_with_another_configuration_is_refused_with_both_digests(tmp_path: Path):
    async def scenario() -> None:
        async with running(make_config(tmp_path)) as run, asyncio.timeout(DEADLINE_S):
            async with run.connect("stranger") as connection:
                await connection.send(ServerHello("0000", 4, 1 << 20))
                body = (await connection.recv()).body
            assert isinstance(body, Stop)
            assert "0000" in body.error
            assert shared_digest(run.config) in body.error

    asyncio.run(scenario())


def test_a_server_that_keeps_sending_tokens_from_the_future_is_counted_named_and_given_up(tmp_path: Path):
    async def scenario() -> None:
        async with running(make_config(tmp_path)) as run, asyncio.timeout(DEADLINE_S):
            learner = asyncio.ensure_future(learn(run))
            async with run.connect("liar") as connection:
                await say_hello(connection, ServerHello(shared_digest(run.config), 1, 1 << 20))
                error = ""
                while not error:
                    received = await connection.recv()
                    match received.body:
                        case WeightsOffer():
                            await connection.send(VersionCommitted(0))
                        case Lease() as lease:
                            assert received.prompt_ids is not None
                            group = answer(lease, received.prompt_ids, version=9)
                            await connection.send(GroupFinished(group_fields(group)), groups=[group])
                        case Stop(error):
                            assert "5 refused messages in a row" in error
                        case _:
                            pass
            status = run.coordinator.status
            assert status.counts["messages_refused"] == 5
            assert status.counts["servers_lost"] == 1
            assert any("group 0 is left out" in note for note in status.notes)
            assert any(
                "refused a message" in note and "liar" in note and "9" in note for note in status.notes
            )
            learner.cancel()
            await asyncio.gather(learner, return_exceptions=True)

    asyncio.run(scenario())


def test_a_run_without_servers_says_how_to_start_one(tmp_path: Path):
    async def scenario() -> None:
        config = make_config(tmp_path, "timeouts.engine_start_s=0.5", "timeouts.connect_s=0.5")
        async with running(config) as run, asyncio.timeout(DEADLINE_S):
            learner = asyncio.ensure_future(learn(run))
            with pytest.raises(PeerLost, match=rf"rollout-server CONFIG --connect {run.address}"):
                await run.task
            await asyncio.gather(learner, return_exceptions=True)

    asyncio.run(scenario())


def test_an_acknowledged_group_is_acknowledged_again_when_it_is_sent_twice(tmp_path: Path):
    async def scenario() -> None:
        async with running(make_config(tmp_path)) as run, asyncio.timeout(DEADLINE_S):
            learner = asyncio.ensure_future(learn(run))
            async with run.connect("server") as connection:
                await say_hello(connection, ServerHello(shared_digest(run.config), 1, 1 << 20))
                acknowledged: list[tuple[int, int]] = []
                while len(acknowledged) < 2:
                    received = await connection.recv()
                    match received.body:
                        case WeightsOffer():
                            await connection.send(VersionCommitted(0))
                        case Lease(0) as lease:
                            assert received.prompt_ids is not None
                            group = answer(lease, received.prompt_ids, version=0)
                            for _ in range(2):
                                await connection.send(GroupFinished(group_fields(group)), groups=[group])
                        case Acknowledged(groups):
                            acknowledged += groups
                        case _:
                            pass
            assert acknowledged == [(0, 0), (0, 0)]
            learner.cancel()
            await asyncio.gather(learner, return_exceptions=True)

    asyncio.run(scenario())


def test_a_stranger_cannot_end_the_run_with_failed_nor_with_another_configuration(tmp_path: Path):
    # Mutations: Failed from anybody raises; a send to a peer that is gone raises inside the loop.
    async def scenario() -> None:
        async with running(make_config(tmp_path)) as run, asyncio.timeout(DEADLINE_S):
            async with run.connect("stranger") as connection:
                await connection.send(Failed("boom", ""))
            async with run.connect("other") as connection:
                await connection.send(ServerHello("0000", 4, 1 << 20))
                await connection.send(Heartbeat([], 0, "idle"))
            server = asyncio.ensure_future(serve(run))
            await learn(run)
            await server
            await run.task
            assert run.coordinator.status.counts["servers_refused"] == 1

    asyncio.run(scenario())


def test_a_server_that_fails_is_given_up_and_the_run_goes_on_with_another(tmp_path: Path):
    async def scenario() -> None:
        config = make_config(tmp_path, "max_staleness=0")
        async with running(config) as run, asyncio.timeout(DEADLINE_S):
            learner = asyncio.ensure_future(learn(run))
            async with run.connect("doomed") as connection:
                await say_hello(connection, ServerHello(shared_digest(run.config), 4, 1 << 20))
                while True:
                    received = await connection.recv()
                    if isinstance(received.body, WeightsOffer):
                        await connection.send(VersionCommitted(0))
                    if isinstance(received.body, Lease):
                        await connection.send(Failed("the engine core is dead", "Traceback"))
                        break
            ordinals = await serve(run, "healthy")
            await learner
            await run.task
            assert sorted(ordinals) == [0, 1, 2, 3, 4, 5]
            assert any("the engine core is dead" in note for note in run.coordinator.status.notes)

    asyncio.run(scenario())


def test_a_server_that_joins_while_the_run_ends_is_sent_home(tmp_path: Path):
    # Mutation: it is welcomed, never told Stop, and the end waits for it.
    async def scenario() -> None:
        async with running(make_config(tmp_path)) as run, asyncio.timeout(DEADLINE_S):
            exporting = asyncio.Event()
            learner = asyncio.ensure_future(learn(run, before_bye=exporting.wait))
            await serve(run)
            async with run.connect("late") as connection:
                await connection.send(ServerHello(shared_digest(run.config), 4, 1 << 20))
                assert (await connection.recv()).body == Stop("")
            exporting.set()
            await learner
            await run.task

    asyncio.run(scenario())


def test_a_server_that_vanishes_without_bye_does_not_hold_up_the_end(tmp_path: Path):
    # Mutation: only Bye counts as leaving.
    async def scenario() -> None:
        async with running(make_config(tmp_path)) as run, asyncio.timeout(DEADLINE_S):
            server = asyncio.ensure_future(serve(run, say_bye=False))
            await learn(run)
            await server
            await run.task
            assert run.coordinator.status.counts["servers_lost"] == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("num_equal", [2, 1])
def test_a_batch_that_teaches_nothing_is_counted_and_said(
    num_equal: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Of 2 groups. Mutations: not said -> a reward that is always 1 looks like a healthy run; said of any batch
    # that has such a group.
    def metrics(*arguments: Any) -> dict[str, float]:
        return {"rollout/equal_reward_groups": float(num_equal), "staleness/max": 0.0}

    async def scenario() -> None:
        async with running(make_config(tmp_path)) as run, asyncio.timeout(DEADLINE_S):
            await asyncio.gather(serve(run), learn(run), run.task)
            status = run.coordinator.status
            assert status.counts["batches_equal_rewards"] == (3 if num_equal == 2 else 0)
            said = [note for note in status.notes if "learns nothing" in note]
            assert [note.partition(":")[0] for note in said] == (
                ["version 1 learns nothing (1 so far)"] if num_equal == 2 else []
            )

    if num_equal == 1:
        monkeypatch.setattr("asyncrl.coordinator.learner_side.batch_metrics", metrics)
    asyncio.run(scenario())


def test_a_reward_that_always_fails_ends_the_run_with_its_reason(tmp_path: Path):
    async def scenario() -> None:
        async with running(make_config(tmp_path)) as run, asyncio.timeout(DEADLINE_S):
            server = asyncio.ensure_future(serve(run, reward=lambda ordinal: None))
            learner = asyncio.ensure_future(learn(run))
            with pytest.raises(
                RewardError, match=r"8 groups in a row have no token to train.*KeyError: 'answer'"
            ):
                await run.task
            await asyncio.gather(server, learner, return_exceptions=True)
            assert any("KeyError: 'answer'" in note for note in run.coordinator.status.notes)

    asyncio.run(scenario())
