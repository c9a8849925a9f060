"""The coordinator's state at a version: a run that goes on from it trains every ordinal once."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from scripted_peers import Server, learn
from scripted_run import DEADLINE_S, Run, make_config, running
from test_ledger import finished

from asyncrl.checkpoint_folder import find_checkpoints
from asyncrl.config import CheckpointConfig
from asyncrl.coordinator.checkpoint import CheckpointWriter, CoordinatorState
from asyncrl.coordinator.ledger import Consumed, Ledger
from asyncrl.coordinator.staleness import Pacing
from asyncrl.coordinator.status import RunStatus
from asyncrl.errors import LearnerError, PeerLost
from asyncrl.stream.messages import Batch

SERVERS = (b"a", b"b")
PACING = Pacing(batch_size=3, max_staleness=2, max_versions=10**9)


class Simulated:
    """A coordinator's ledger with a learner and servers that do whatever they are told, and its checkpoints."""

    def __init__(self) -> None:
        self.ledger = Ledger(PACING, "mask")
        self.version = 0
        self.formed: dict[int, list[int]] = {}
        """Batches that are not trained yet."""
        self.trained: list[list[int]] = []
        """Of each version."""
        self.untrainable: set[int] = set()
        self.saved = self._state(), 0

    def step(self, what: str, rng: random.Random) -> None:
        ledger, server = self.ledger, rng.choice(SERVERS)
        match what:
            case "grant":
                ledger.grant(server, rng.randint(max(0, self.version - 1), self.version))
            case "finish" if leases := ledger.leases_of(server):
                ordinal = rng.choice(leases).ordinal
                fails = rng.random() < 0.1
                ledger.accept(finished(ordinal, self.version, None if fails else 1.0))
            case "lose":
                ledger.lose_server(server)
            case "form" if ledger.num_batches_formed <= self.version + 1:
                index = ledger.num_batches_formed
                if (batch := ledger.form_batch()) is not None:
                    self.formed[index] = [group.ordinal for group in batch]
            case "train" if self.version in self.formed:
                self.trained.append(self.formed.pop(self.version))
                self.version += 1
            case "save":
                self.saved = self._state(), len(self.trained)
            case "resume":
                self.resume()
        ledger = self.ledger
        self.untrainable |= {group.ordinal for group in ledger.take_untrainable()}
        num_lost = len(ledger._lost)
        bound = (PACING.max_staleness + self.version + 1) * PACING.batch_size
        assert ledger.outstanding + num_lost + ledger.num_batches_formed * PACING.batch_size <= bound

    def resume(self) -> None:
        """The newest checkpoint, by way of its file."""
        state, num_versions = self.saved
        state = msgspec.json.decode(msgspec.json.encode(state), type=CoordinatorState)
        self.ledger, self.version = Ledger(PACING, "mask"), state.version
        state.restore(self.ledger, RunStatus(100, state.version))
        self.formed, self.trained = {}, self.trained[:num_versions]
        self.untrainable = {ordinal for ordinal in self.untrainable if ordinal in self.ledger.consumed}

    def _state(self) -> CoordinatorState:
        directory: Any = SimpleNamespace(flush=dict)
        writer = CheckpointWriter(CheckpointConfig(), [10], self.ledger, RunStatus(100), directory)
        return writer.state(self.version, [o for batch in self.formed.values() for o in batch])

    def drain(self) -> None:
        """Everything that was granted is trained or left out, in as many versions as that takes."""
        goal = self.ledger._next_ordinal
        for _ in range(200):
            while self.ledger.grant(SERVERS[0], self.version) is not None:
                pass
            for server in SERVERS:
                for lease in self.ledger.leases_of(server):
                    self.ledger.accept(finished(lease.ordinal, self.version))
            while self.ledger.num_batches_formed <= self.version + 1:
                index = self.ledger.num_batches_formed
                if (batch := self.ledger.form_batch()) is None:
                    break
                self.formed[index] = [group.ordinal for group in batch]
            while self.version in self.formed:
                self.trained.append(self.formed.pop(self.version))
                self.version += 1
            self.untrainable |= {group.ordinal for group in self.ledger.take_untrainable()}
            if self.ledger.consumed.frontier >= goal:
                return
        raise AssertionError(f"not drained: {self.ledger.consumed}, goal {goal}")


# Mutations caught: ordinals of batches ahead of the version counted as consumed (they are never trained); untrained
# ones below the newest consumed skipped; consumed ones granted again; a batch index that starts at 0.
@pytest.mark.parametrize("seed", range(60))
def test_after_a_resume_at_any_point_every_ordinal_is_trained_once(seed: int):
    run, rng = Simulated(), random.Random(seed)
    kinds = ["grant"] * 6 + ["finish"] * 8 + ["form"] * 3 + ["train"] * 3 + ["save", "save", "lose", "resume"]
    for _ in range(150):
        run.step(rng.choice(kinds), rng)
    run.resume()
    run.drain()
    trained = [ordinal for batch in run.trained for ordinal in batch]
    assert len(trained) == len(set(trained))
    assert not set(trained) & run.untrainable
    assert set(trained) | run.untrainable >= set(range(run.ledger.consumed.frontier))
    assert len(run.trained) == run.version


def test_a_resumed_ledger_grants_what_was_not_trained_lowest_first():
    # Mutations: the next ordinal at the frontier; lost ones after new ones.
    ledger = Ledger(Pacing(4, 0, 100), "mask")
    ledger.resume_at(5, Consumed(17, {19, 22}))
    granted = [ledger.grant(b"a", 5) for _ in range(5)]
    assert [lease.ordinal if lease else None for lease in granted] == [17, 18, 20, 21, None]
    assert Consumed(20, {22}).without([17, 19, 22, 30]) == Consumed(17, {18})
    assert Consumed(20, {22}).without([]) == Consumed(20, {22})


async def until_it_fails(run: Run, fail_at: int, batches: list[Batch]) -> None:
    """Once version 4 is evaluated."""

    async def evaluated(index: int) -> None:
        while index == fail_at and run.evaluations()[-1]["version"] < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # written by the coordinator, which signals nothing

    server = asyncio.ensure_future(Server(run).serve())
    await learn(run, batches=batches, before_train=evaluated, fail_at=fail_at)
    with pytest.raises(PeerLost, match="layer 3 is NaN"):
        await run.task
    await asyncio.gather(server, return_exceptions=True)


async def to_its_end(run: Run, batches: list[Batch]) -> None:
    server = asyncio.ensure_future(Server(run).serve())
    await learn(run, batches=batches)
    await server
    await run.task


# Mutations caught: the run begun at version 0; metrics, trajectories or evaluations of a version twice; counters from
# 0; version 0 and the checkpoint's evaluated again; old checkpoints kept.
def test_a_run_that_failed_goes_on_at_its_newest_checkpoint(tmp_path: Path):
    config = make_config(
        tmp_path,
        "checkpoint={every: 2, keep: 1}",
        "learner.max_versions=7",
        "data.eval=rev4",
        "eval.every=2",
    )
    first: list[Batch] = []
    second: list[Batch] = []

    async def scenario() -> None:
        async with asyncio.timeout(DEADLINE_S):
            async with running(config) as run:
                await until_it_fails(run, 5, first)
                assert find_checkpoints(run.path)[0][0].version == 4
                assert [e["version"] for e in run.evaluations()] == [0, 2, 4]
                counted = json.loads((run.path / "checkpoints/version_000004/coordinator.json").read_text())[
                    "status_counts"
                ]["trajectories_scored"]
            async with running(config, resume=True) as run:  # and once more, before it has a newer one
                await until_it_fails(run, 4, [])
            async with running(config, resume=True) as run:
                assert (run.coordinator.status.version, run.coordinator.status.first_version) == (4, 4)
                await to_its_end(run, second)
            assert ("announce", 4) in run.log
            assert ("announce", 0) not in run.log
            assert [b.plan.index for b in second] == [4, 5, 6]
            trained = [o for b in [*first[:4], *second] for o in b.plan.ordinals]
            assert sorted(trained) == list(range(14))
            lines = run.metrics()
            assert [m["training/policy_version"] for m in lines] == [1, 2, 3, 4, 5, 6, 7]
            assert lines[4]["counts/trajectories_scored"] > counted
            names = sorted(file.name for file in (run.path / "trajectories").iterdir())
            assert names == [f"version_00000{i}.jsonl" for i in range(1, 8)]
            assert [(e["version"], e["cut"]) for e in run.evaluations()] == [(v, "") for v in (0, 2, 4, 6, 7)]
            assert {e[2] for e in run.log if e[1:2] == ("eval",)} == {6, 7}
            assert [c.version for c in find_checkpoints(run.path)[0]] == [6]
            aside = sorted(folder.name for folder in (run.path / "aside").iterdir())
            assert aside == ["after_version_000004", "after_version_000004-2"]
            lost = (run.path / "aside" / "after_version_000004" / "metrics.jsonl").read_text()
            assert json.loads(lost)["training/policy_version"] == 5

    asyncio.run(scenario())


def test_a_checkpoint_that_the_ranks_wrote_elsewhere_ends_the_run_with_its_folder(tmp_path: Path):
    # Mutation: COMMIT written into a folder without shards.
    async def scenario() -> None:
        directory: Any = SimpleNamespace(flush=dict, path=tmp_path)
        ledger, status = Ledger(PACING, "mask"), RunStatus(100)
        writer = CheckpointWriter(CheckpointConfig(every=2), [10], ledger, status, directory)
        await writer.reported(1, [])
        with pytest.raises(LearnerError, match=r"version_000002\.partial cannot be completed"):
            await writer.reported(2, [])

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []
