"""Evaluations while a run trains: the coordinator over real sockets, scripted peers in place of engine and learner."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_dataset import dataset_of

from asyncrl.config import Config, load_config, shared_digest
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.mailbox import Mailbox
from asyncrl.errors import PeerLost
from asyncrl.run_directory import RunDirectory
from asyncrl.stream.codec import Limits, Received, group_fields
from asyncrl.stream.connections import Connection
from asyncrl.stream.envelope import Envelope
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
from asyncrl.stream.sockets import Listener
from asyncrl.types import Status, Trajectory, TrajectoryGroup

NUM_PROMPTS = 6
DEADLINE_S = 30.0


def make_config(tmp_path: Path, *overrides: str) -> Config:
    return load_config(
        None,
        [
            f"run.dir={tmp_path}",
            "run.name=test",
            "rollout.group_size=2",
            "learner.prompts_per_batch=2",
            "learner.max_versions=4",
            "max_staleness=1",
            "timeouts.heartbeat_s=1.5",
            "data.eval=rev4",
            "eval.every=2",
            *overrides,
        ],
    )


def limits() -> Limits:
    return Limits(
        vocab_size=50,
        group_size=2,
        max_prompt_tokens=512,
        max_completion_tokens=8,
        eval_num_samples=1,
        eval_max_completion_tokens=8,
    )


@dataclass
class Run:
    """A running coordinator, and what its scripted peers saw, in the order in which they saw it."""

    config: Config
    coordinator: Coordinator
    address: str
    task: asyncio.Task[None]
    path: Path
    log: list[tuple[Any, ...]] = field(default_factory=list)
    logged: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def note(self, *entry: Any) -> None:
        self.log.append(entry)
        async with self.logged:
            self.logged.notify_all()

    async def until(self, *entry: Any) -> None:
        """Waits until some peer has noted it."""
        async with self.logged:
            await self.logged.wait_for(lambda: entry in self.log)

    def position(self, *entry: Any) -> int:
        return self.log.index(entry)

    @asynccontextmanager
    async def connect(self, name: str) -> AsyncIterator[Connection]:
        envelope = Envelope(name, max_message_bytes=1 << 20)
        async with Connection(self.address, envelope, limits(), heartbeat_s=5.0, connect_s=5.0) as connection:
            yield connection

    def evaluations(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "evaluations.jsonl").read_text().splitlines()]


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[Run]:
    directory = RunDirectory.create(config)
    rows = [{"prompt": f"<{i}>", "answer": str(i), "data_source": "test"} for i in range(10)]
    prompts = [np.array([i], np.int32) for i in range(10)]
    async with Listener("127.0.0.1", 0, max_message_bytes=1 << 20, heartbeat_s=5.0) as listener:
        known = limits()
        known.run, known.incarnation, known.newest_version = "test.1", "abc", -1
        mailbox = Mailbox(listener, known, max_message_bytes=1 << 20)
        coordinator = Coordinator(
            config,
            dataset_of(rows, prompts),
            mailbox,
            directory,
            eval_dataset=dataset_of(rows[:NUM_PROMPTS], prompts[:NUM_PROMPTS]),
        )
        task = asyncio.ensure_future(coordinator.run())
        try:
            yield Run(config, coordinator, listener.address, task, directory.path)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            directory.close()


def group(
    ordinal: int, prompt_ids: np.ndarray, version: int, num_samples: int, reward: float
) -> TrajectoryGroup:
    one = Trajectory(
        np.ones(2, np.int32),
        np.ones(2, np.uint8),
        np.full(2, -0.5, np.float32),
        np.full(2, version, np.int32),
        reward,
        Status.SCORED,
        "stop",
        text="7",
    )
    return TrajectoryGroup(ordinal, 0, prompt_ids, [one] * num_samples)


class Left(Exception):
    """A scripted server has ended."""


@dataclass
class Server:
    """A scripted rollout server. It notes offers, commits, leases; `before_*` may hold it up."""

    run: Run
    name: str = "server"
    before_commit: Callable[[int], Coroutine[Any, Any, None]] | None = None
    before_eval: Callable[[int, int], Coroutine[Any, Any, None]] | None = None
    refuses: int | None = None
    """A version whose snapshot it does not find."""
    sampled_by: Callable[[int], int] = lambda version: version
    """What labels the tokens of an evaluation."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: it fails."""

    async def serve(self) -> None:
        async with self.run.connect(self.name) as self.connection:
            await self.connection.send(ServerHello(shared_digest(self.run.config), 4, 1 << 20))
            assert isinstance((await self.connection.recv()).body, ServerWelcome)
            await self.run.note(self.name, "up")
            self.version = -1
            self.leases: set[int] = set()
            self.eval_leases: set[tuple[int, int]] = set()
            try:
                async with asyncio.TaskGroup() as self.tasks:
                    self.tasks.create_task(self._beat())
                    self.tasks.create_task(self._fail_when_told())
                    self.tasks.create_task(self._take())
            except* Left:
                pass

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
                    await self.run.note(self.name, "lease", lease.ordinal)
                    assert received.prompt_ids is not None
                    made = group(lease.ordinal, received.prompt_ids, self.version, 2, 1.0)
                    await self.connection.send(GroupFinished(group_fields(made)), groups=[made])
                case EvalLease() as lease:
                    self.tasks.create_task(self._evaluate(lease, received))
                case Stop(""):
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

    async def _evaluate(self, lease: EvalLease, received: Received) -> None:
        self.eval_leases.add((lease.version, lease.row_index))
        await self.run.note(self.name, "eval", lease.version, lease.row_index)
        if self.before_eval is not None:
            await self.before_eval(lease.version, lease.row_index)
        assert received.prompt_ids is not None
        reward = float(lease.row_index < 2 + lease.version)
        labels = self.sampled_by(self.version)
        made = group(lease.row_index, received.prompt_ids, labels, len(lease.seeds), reward)
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


async def learn(run: Run, before_train: Callable[[int], Coroutine[Any, Any, None]] | None = None) -> None:
    """A scripted learner rank 0 as LearnerLoop is where versions are evaluated: it publishes the last one too."""
    async with run.connect("learner-0") as connection:
        waiting: list[Any] = []

        async def wait_for(kind: type) -> Any:
            for body in waiting:
                if isinstance(body, kind):
                    waiting.remove(body)
                    return body
            while True:
                body = (await connection.recv()).body
                if isinstance(body, kind):
                    return body
                if isinstance(body, Stop):
                    raise PeerLost(body.error)
                waiting.append(body)

        async def publish(version: int) -> None:
            await run.note("announce", version)
            await connection.send(VersionAnnounced(version))
            await wait_for(VersionRecorded)
            await run.note("recorded", version)
            await connection.send(VersionPublished(version, "/nowhere", b"{}"))

        await connection.send(RankHello(shared_digest(run.config), 0, 1))
        await wait_for(RankWelcome)
        await publish(0)
        for index in range(run.config.learner.max_versions):
            if before_train is not None:
                await before_train(index)
            await wait_for(Batch)
            await publish(index + 1)
            timing = {"timing_s/wait": 0.0, "timing_s/update_actor": 0.0, "timing_s/update_weights": 0.0}
            await connection.send(StepReport(index, timing))
            await run.note("reported", index)
        await wait_for(Stop)
        await run.note("learner stops")
        await connection.send(Bye())


def play(scenario: Callable[[Run], Coroutine[Any, Any, None]], config: Config) -> None:
    async def whole() -> None:
        async with asyncio.timeout(DEADLINE_S), running(config) as run:
            await scenario(run)

    asyncio.run(whole())


def assert_pinned(run: Run) -> None:
    """Every evaluation lease of v came after the server committed v, and before it was offered more."""
    newest_offer: dict[str, int] = {}
    committed: dict[str, int] = {}
    for entry in run.log:
        match entry:
            case (name, "offer", version):
                newest_offer[name] = version
            case (name, "commit", version):
                committed[name] = version
            case (name, "eval", version, _):
                assert (committed[name], newest_offer[name]) == (version, version), entry


def test_every_due_version_is_evaluated_by_its_own_tokens_and_written_down(tmp_path: Path):
    # Mutations: evaluations labelled with the newest version; the last version not evaluated; version 0 left out.
    async def scenario(run: Run) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Server(run).serve())
            tasks.create_task(learn(run))
            await run.task
        assert_pinned(run)
        found = run.evaluations()
        assert [e["version"] for e in found] == [0, 2, 4]
        means = [e["metrics"]["val-core/test/reward/mean@1"] for e in found]
        assert means == [2 / 6, 4 / 6, 6 / 6], "the scripted reward grows with the version"
        assert [(e["num_prompts"], e["num_left_out"], e["cut"]) for e in found] == [(6, 0, "")] * 3
        assert all(e["metrics"]["timing_s/testing"] == e["seconds"] for e in found)
        lines = (run.path / "evaluations" / "version_000002.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert [r["ordinal"] for r in records] == list(range(6))
        assert [r["prompt"] for r in records] == [f"<{i}>" for i in range(6)]
        assert {tuple(r["versions"]) for r in records} == {(2,)}
        notes = [note for note in run.coordinator.status.notes if note.startswith("evaluation of version 2")]
        assert len(notes) == 1
        assert notes[0].startswith("evaluation of version 2: mean@1 0.667 (6 prompts, ")
        metrics = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
        assert [m["training/policy_version"] for m in metrics] == [1, 2, 3, 4]

    play(scenario, make_config(tmp_path))


def test_newer_versions_are_withheld_until_the_share_is_done_while_training_goes_on(tmp_path: Path):
    # Mutations: offers not withheld; training leases withheld too (nothing is trained: no version 1).
    async def scenario(run: Run) -> None:
        answers = asyncio.Event()

        async def held(version: int, row_index: int) -> None:
            if version == 0:
                await answers.wait()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Server(run, before_eval=held).serve())
            tasks.create_task(learn(run))
            await run.until("recorded", 2)  # S = 1: two batches of version 0's tokens make versions 1 and 2
            assert ("server", "offer", 1) not in run.log
            assert [entry[2] for entry in run.log if entry[1:2] == ("lease",)] == [0, 1, 2, 3]
            answers.set()
            await run.task
        assert_pinned(run)
        assert run.position("server", "offer", 2) > run.position("server", "eval", 0, 5)
        assert [e["version"] for e in run.evaluations()] == [0, 2, 4]

    play(scenario, make_config(tmp_path))


def test_a_server_that_has_done_its_share_goes_on_before_the_others_have(tmp_path: Path):
    # Mutation: all servers kept until the evaluation is complete.
    async def scenario(run: Run) -> None:
        answers = asyncio.Event()

        async def held(version: int, row_index: int) -> None:
            if version == 0:
                await answers.wait()

        async with asyncio.TaskGroup() as tasks:
            slow = tasks.create_task(Server(run, "slow", before_eval=held).serve())
            tasks.create_task(Server(run, "fast").serve())
            await run.until("slow", "up")
            await run.until("fast", "up")
            tasks.create_task(learn(run))
            await run.until("fast", "offer", 2)
            assert ("slow", "offer", 1) not in run.log
            answers.set()
            await run.task
            await slow
        assert_pinned(run)
        assert [(e["version"], e["cut"]) for e in run.evaluations()] == [(0, ""), (2, ""), (4, "")]

    play(scenario, make_config(tmp_path))


def test_a_version_under_evaluation_is_not_replaced_before_a_server_has_it(tmp_path: Path):
    # Mutation: VersionRecorded at once: the snapshot of version 2 would be unlinked before anybody applied it.
    async def scenario(run: Run) -> None:
        may_commit = asyncio.Event()

        async def slowly(version: int) -> None:
            if version == 2:
                await may_commit.wait()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Server(run, before_commit=slowly).serve())
            tasks.create_task(learn(run))
            await run.until("announce", 3)
            await asyncio.sleep(0.7)  # heartbeats, and looks at the deadlines
            assert ("recorded", 3) not in run.log
            may_commit.set()
            await run.task
        assert_pinned(run)
        assert run.position("recorded", 3) > run.position("server", "commit", 2)
        assert [e["version"] for e in run.evaluations()] == [0, 2, 4]

    play(scenario, make_config(tmp_path))


def test_an_announcement_is_held_back_for_half_of_the_collective_timeout_at_most(tmp_path: Path):
    # Mutation: no limit: the other ranks' collective would time out.
    async def scenario(run: Run) -> None:
        may_commit = asyncio.Event()

        async def slowly(version: int) -> None:
            if version == 2:
                await may_commit.wait()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Server(run, before_commit=slowly).serve())
            tasks.create_task(learn(run))
            await run.until("server", "offer", 3)
            may_commit.set()
            await run.task
        cut = {e["version"]: e["cut"] for e in run.evaluations()}
        assert cut == {0: "", 2: "no server is at version 2, and its snapshot is gone", 4: ""}
        assert run.coordinator.status.counts["evaluations_cut"] == 1
        assert any("evaluation of version 2 was cut" in note for note in run.coordinator.status.notes)
        assert run.evaluations()[0]["version"] == 0
        assert next(e for e in run.evaluations() if e["cut"])["metrics"] == {}

    play(scenario, make_config(tmp_path, "timeouts.collective_s=2"))


def test_the_leases_of_a_lost_server_go_to_another_at_the_version(tmp_path: Path):
    async def scenario(run: Run) -> None:
        never = asyncio.Event()
        lost = Server(run, "lost", before_eval=lambda version, row_index: wait(never))
        may_answer = asyncio.Event()

        async def after_the_loss(version: int, row_index: int) -> None:
            await may_answer.wait()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(lost.serve())
            tasks.create_task(Server(run, "other", before_eval=after_the_loss).serve())
            await run_first_evals(run, tasks)
            shares = [sum(entry[:3] == (name, "eval", 0) for entry in run.log) for name in ("lost", "other")]
            assert shares == [3, 3], "neither took all because it was there first"
            lost.stop.set()
            for row_index in range(NUM_PROMPTS):  # its own, and then those of the lost server
                await run.until("other", "eval", 0, row_index)
            may_answer.set()
            await run.task
        assert_pinned(run)
        first = run.evaluations()[0]
        assert (first["version"], first["num_prompts"], first["cut"]) == (0, 6, "")
        assert {entry[3] for entry in run.log if entry[:3] == ("other", "eval", 0)} == set(range(6))
        assert run.coordinator.status.counts["eval_leases_lost"] > 0

    play(scenario, make_config(tmp_path))


async def run_first_evals(run: Run, tasks: asyncio.TaskGroup) -> None:
    """Starts the learner once both servers are there, and waits until every prompt of version 0 is leased."""
    await run.until("lost", "up")
    await run.until("other", "up")
    tasks.create_task(learn(run))
    async with run.logged:
        await run.logged.wait_for(lambda: sum(e[1:3] == ("eval", 0) for e in run.log) == NUM_PROMPTS)


async def wait(event: asyncio.Event) -> None:
    await event.wait()


def test_an_evaluation_whose_last_server_is_lost_goes_on_with_one_that_joins_while_its_snapshot_is_there(
    tmp_path: Path,
):
    # Mutation: cut with the last server, although version 0 is still the newest.
    async def scenario(run: Run) -> None:
        never = asyncio.Event()
        may_train = asyncio.Event()
        lost = Server(run, "lost", before_eval=lambda version, row_index: wait(never))

        async def held(index: int) -> None:
            await may_train.wait()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(lost.serve())
            tasks.create_task(learn(run, before_train=held))
            await run.until("lost", "eval", 0, 0)
            lost.stop.set()
            tasks.create_task(Server(run, "joins").serve())
            await run.until("joins", "eval", 0, 0)
            may_train.set()
            await run.task
        assert_pinned(run)
        assert [(e["version"], e["num_prompts"], e["cut"]) for e in run.evaluations()] == [
            (0, 6, ""),
            (2, 6, ""),
            (4, 6, ""),
        ]

    play(scenario, make_config(tmp_path))


def test_an_evaluation_whose_last_server_is_lost_after_its_snapshot_is_cut_and_the_run_goes_on(
    tmp_path: Path,
):
    # Mutation: it stays alive: the run would wait for it at its end, and show nothing.
    async def scenario(run: Run) -> None:
        never = asyncio.Event()

        async def held(version: int, row_index: int) -> None:
            if version == 0:
                await never.wait()

        lost = Server(run, "lost", before_eval=held)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(lost.serve())
            tasks.create_task(learn(run))
            await run.until("recorded", 2)
            lost.stop.set()
            tasks.create_task(Server(run, "joins").serve())
            await run.task
        assert_pinned(run)
        cut = {e["version"]: e["cut"] for e in run.evaluations()}
        assert cut == {0: "no server is at version 0, and its snapshot is gone", 2: "", 4: ""}

    play(scenario, make_config(tmp_path))


def test_tokens_of_another_version_cut_the_evaluation_and_are_named(tmp_path: Path):
    # Mutation: the numbers of version 2 with tokens of version 1.
    async def scenario(run: Run) -> None:
        server = Server(run, sampled_by=lambda version: 1 if version == 2 else version)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve())
            tasks.create_task(learn(run))
            await run.task
        cut = {e["version"]: e["cut"] for e in run.evaluations()}
        assert cut == {0: "", 2: "server: an evaluation of version 2 has tokens of versions [1]", 4: ""}
        assert run.coordinator.status.counts["messages_refused"] >= 1
        assert run.coordinator.status.counts["evaluations_finished"] == 2

    play(scenario, make_config(tmp_path))


def test_a_server_that_cannot_take_the_version_goes_on_to_the_next_and_others_evaluate(tmp_path: Path):
    async def scenario(run: Run) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Server(run, "good").serve())
            tasks.create_task(Server(run, "refuses", refuses=2).serve())
            tasks.create_task(learn(run))
            await run.task
        assert_pinned(run)
        assert {entry[0] for entry in run.log if entry[1:3] == ("eval", 2)} == {"good"}
        assert [(e["version"], e["cut"]) for e in run.evaluations()] == [(0, ""), (2, ""), (4, "")]

    play(scenario, make_config(tmp_path))


def test_the_run_waits_for_the_evaluation_of_its_last_version_and_ends(tmp_path: Path):
    # Mutations: Stop with the last step; training leases granted when every batch is formed.
    async def scenario(run: Run) -> None:
        answers = asyncio.Event()

        async def held(version: int, row_index: int) -> None:
            if version == 4:
                await answers.wait()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Server(run, before_eval=held).serve())
            tasks.create_task(learn(run))
            await run.until("server", "eval", 4, 0)
            await asyncio.sleep(0.7)
            assert not run.coordinator.ending.is_set()
            assert ("learner stops",) not in run.log
            answers.set()
            await run.task
        assert run.evaluations()[-1]["version"] == 4
        assert run.evaluations()[-1]["cut"] == ""
        last_train = max(run.position(*e) for e in run.log if e[1:2] == ("lease",))
        assert last_train < run.position("server", "commit", 4)

    play(scenario, make_config(tmp_path))


def test_an_evaluation_that_does_not_end_is_cut_after_its_deadline_and_the_run_ends_well(tmp_path: Path):
    # Mutation: the deadline only while training: the run would never end.
    async def scenario(run: Run) -> None:
        never = asyncio.Event()

        async def held(version: int, row_index: int) -> None:
            if version == 4 and row_index == 3:
                await never.wait()

        async with asyncio.TaskGroup() as tasks:
            server = tasks.create_task(Server(run, before_eval=held).serve())
            tasks.create_task(learn(run))
            await run.task
            server.cancel()
        last = run.evaluations()[-1]
        assert last["version"] == 4
        assert last["cut"].startswith("5 of 6 prompts were done within timeouts.eval_s = 2 s")
        assert last["metrics"] == {}
        lines = (run.path / "evaluations" / "version_000004.jsonl").read_text().splitlines()
        assert [json.loads(line)["ordinal"] for line in lines] == [0, 1, 2, 4, 5], "what came is kept"

    play(scenario, make_config(tmp_path, "timeouts.eval_s=2"))


def test_a_run_whose_servers_leave_during_the_last_evaluation_reports_it_cut_and_ends_well(tmp_path: Path):
    async def scenario(run: Run) -> None:
        never = asyncio.Event()

        async def held(version: int, row_index: int) -> None:
            if version == 4:
                await never.wait()

        server = Server(run, before_eval=held)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve())
            tasks.create_task(learn(run))
            await run.until("reported", 3)
            await run.until("server", "eval", 4, 0)
            server.stop.set()
            await run.task
        assert (run.evaluations()[-1]["version"], run.evaluations()[-1]["cut"]) == (
            4,
            "every server has left",
        )

    play(scenario, make_config(tmp_path))


@pytest.mark.parametrize("every", [1, 3])
def test_evaluations_of_versions_that_follow_each_other_all_happen_in_the_synchronous_algorithm(
    tmp_path: Path, every: int
):
    # Mutation: keeps() of a version that is over holds the server for ever (S = 0: nothing is ever leased again).
    async def scenario(run: Run) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Server(run, "a").serve())
            tasks.create_task(Server(run, "b").serve())
            tasks.create_task(learn(run))
            await run.task
        assert_pinned(run)
        due = [v for v in range(5) if v % every == 0 or v == 4]
        assert sorted(e["version"] for e in run.evaluations()) == due
        assert [e["cut"] for e in run.evaluations()] == [""] * len(due)
        metrics = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
        assert [m["staleness/max"] for m in metrics] == [0, 0, 0, 0]

    play(scenario, make_config(tmp_path, "max_staleness=0", f"eval.every={every}"))


def test_evaluations_are_not_counted_as_training(tmp_path: Path):
    # Mutations: their tokens in rollout/tokens_per_s; their groups in the ledger, counts or in-flight groups.
    async def scenario(run: Run) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Server(run).serve())
            tasks.create_task(learn(run))
            await run.task
        metrics = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
        assert sum(m["rollout/tokens_per_s"] * m["timing_s/step"] for m in metrics) == pytest.approx(
            4 * 2 * 2 * 2, rel=0.05
        ), "4 batches of 2 groups of 2 trajectories of 2 tokens"
        assert metrics[-1]["counts/trajectories_scored"] == 4 * 2 * 2
        assert max(m["rollout/in_flight"] for m in metrics) <= 4

    play(scenario, make_config(tmp_path))
