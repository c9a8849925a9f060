"""Evaluations while a run trains: the coordinator over real sockets, scripted peers in place of engine and learner."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import scripted_run
from scripted_peers import Server, learn, make_group
from scripted_run import DEADLINE_S, NUM_EVAL_ROWS, Run, play

from asyncrl.config import Config
from asyncrl.errors import PeerLost
from asyncrl.stream.codec import Received, group_fields
from asyncrl.stream.messages import EvalFinished, EvalLease


def make_config(tmp_path: Path, *overrides: str) -> Config:
    evaluated = ["data.eval=rev4", "eval.every=2", "learner.max_versions=4", "max_staleness=1"]
    return scripted_run.make_config(tmp_path, *evaluated, *overrides)


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
        assert [m["training/policy_version"] for m in run.metrics()] == [1, 2, 3, 4]

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
            for row_index in range(NUM_EVAL_ROWS):  # its own, and then those of the lost server
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
        await run.logged.wait_for(lambda: sum(e[1:3] == ("eval", 0) for e in run.log) == NUM_EVAL_ROWS)


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


async def held_for_ever(version: int, row_index: int) -> None:
    """Of version 0 one prompt of six is answered."""
    if version == 0 and row_index:
        await asyncio.Event().wait()


async def end_of(run: Run, tasks: list[asyncio.Task[Any]]) -> str:
    """Waits for the run's end and gives its error; the peers, which are told or not, go with it."""
    ended = (await asyncio.gather(run.task, return_exceptions=True))[0]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return type(ended).__name__


def test_an_evaluation_in_flight_when_the_run_fails_is_written_down_as_cut_by_that(tmp_path: Path):
    # Mutations: nothing is written (no evaluations.jsonl); it is written without what came.
    async def scenario(run: Run) -> None:
        server = asyncio.ensure_future(Server(run, before_eval=held_for_ever).serve())
        learner = asyncio.ensure_future(learn(run, fail_at=1))
        assert await end_of(run, [server, learner]) == "PeerLost"
        (only,) = run.evaluations()
        assert (only["version"], only["num_prompts"], only["metrics"]) == (0, 1, {})
        assert only["cut"] == "the run failed: learner-0 failed: the gradient of layer 3 is NaN"
        lines = (run.path / "evaluations" / "version_000000.jsonl").read_text().splitlines()
        assert [json.loads(line)["ordinal"] for line in lines] == [0]
        assert run.coordinator.status.counts["evaluations_cut"] == 1
        assert "evaluation of version 0 was cut" in run.coordinator.status.notes[-1]

    play(scenario, make_config(tmp_path))


def test_an_evaluation_in_flight_when_the_run_is_ended_from_outside_is_written_down_as_cut(tmp_path: Path):
    # Mutation: only a failure of the coordinator's own is written down: Ctrl-C and a lost child cancel it.
    async def scenario(run: Run) -> None:
        server = asyncio.ensure_future(Server(run, before_eval=held_for_ever).serve())
        learner = asyncio.ensure_future(learn(run))
        await run.until("server", "eval", 0, 5)
        run.task.cancel()
        assert await end_of(run, [server, learner]) == "CancelledError"
        assert [(e["version"], e["cut"]) for e in run.evaluations()] == [(0, "the run was ended")]

    play(scenario, make_config(tmp_path))


def test_an_evaluation_whose_numbers_are_being_worked_out_when_the_run_is_ended_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Mutation: only evaluations that wait for results are cut; this one has them all.
    working, may_end = threading.Event(), threading.Event()

    def slowly(*_: Any) -> None:
        working.set()
        assert may_end.wait(DEADLINE_S)

    monkeypatch.setattr("asyncrl.coordinator.eval_side.evaluate", slowly)

    async def scenario(run: Run) -> None:
        server = asyncio.ensure_future(Server(run).serve())
        learner = asyncio.ensure_future(learn(run))
        await asyncio.to_thread(working.wait, DEADLINE_S)
        run.task.cancel()
        await end_of(run, [server, learner])
        first = run.evaluations()[0]
        assert (first["version"], first["num_prompts"]) == (0, 6)
        assert first["cut"] == "its numbers were not worked out: the run was ended"
        may_end.set()

    try:
        play(scenario, make_config(tmp_path))
    finally:
        may_end.set()


def test_a_second_result_of_a_prompt_changes_nothing_whatever_sampled_it(tmp_path: Path):
    # Mutation: versions are compared before it is known that nobody waits for the result: the evaluation is cut.
    class Repeats(Server):
        async def _evaluate(self, lease: EvalLease, received: Received) -> None:
            await super()._evaluate(lease, received)
            if lease.version == 2:
                assert received.prompt_ids is not None
                again = make_group(lease.row_index, received.prompt_ids, version=1, num_samples=1)
                await self.connection.send(EvalFinished(2, group_fields(again)), groups=[again])

    async def scenario(run: Run) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Repeats(run).serve())
            tasks.create_task(learn(run))
            await run.task
        assert [(e["version"], e["cut"]) for e in run.evaluations()] == [(0, ""), (2, ""), (4, "")]
        assert run.coordinator.status.counts["eval_groups_ignored"] == NUM_EVAL_ROWS
        assert run.coordinator.status.counts["messages_refused"] == 0

    play(scenario, make_config(tmp_path))


def test_a_run_without_servers_ends_in_time_although_an_evaluation_waits_for_one(tmp_path: Path):
    # Mutation: an evaluation that lives counts as progress: the run waits for timeouts.eval_s first.
    async def scenario(run: Run) -> None:
        learner = asyncio.ensure_future(learn(run))
        with pytest.raises(PeerLost, match="no rollout server for 1 s"):
            await run.task
        await asyncio.gather(learner, return_exceptions=True)
        assert [e["version"] for e in run.evaluations()] == [0]

    overrides = ["timeouts.engine_start_s=0.5", "timeouts.connect_s=0.5"]
    play(scenario, make_config(tmp_path, *overrides))


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
        assert [m["staleness/max"] for m in run.metrics()] == [0, 0, 0, 0]

    play(scenario, make_config(tmp_path, "max_staleness=0", f"eval.every={every}"))


def test_evaluations_are_not_counted_as_training(tmp_path: Path):
    # Mutations: their tokens in rollout/tokens_per_s; their groups in the ledger, counts or in-flight groups.
    async def scenario(run: Run) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(Server(run).serve())
            tasks.create_task(learn(run))
            await run.task
        assert sum(m["rollout/tokens_per_s"] * m["timing_s/step"] for m in run.metrics()) == pytest.approx(
            4 * 2 * 2 * 2, rel=0.05
        ), "4 batches of 2 groups of 2 trajectories of 2 tokens"
        assert run.metrics()[-1]["counts/trajectories_scored"] == 4 * 2 * 2
        assert max(m["rollout/in_flight"] for m in run.metrics()) <= 4

    play(scenario, make_config(tmp_path))
