"""The coordinator over real sockets, with scripted peers in place of engine and learner."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from scripted_peers import Server, learn, make_group, say_hello
from scripted_run import DEADLINE_S, make_config, running

from asyncrl.config import shared_digest
from asyncrl.errors import PeerLost, RewardError
from asyncrl.stream.codec import group_fields
from asyncrl.stream.messages import (
    Acknowledged,
    Batch,
    Failed,
    GroupFinished,
    Heartbeat,
    Lease,
    ServerHello,
    Stop,
    VersionCommitted,
    WeightsOffer,
)


def test_a_run_trains_every_version_and_lets_everyone_go(tmp_path: Path):
    async def scenario() -> None:
        async with running(make_config(tmp_path)) as run, asyncio.timeout(DEADLINE_S):
            batches: list[Batch] = []
            server = asyncio.ensure_future(Server(run).serve())
            await learn(run, batches=batches)
            ordinals = await server
            await run.task
            assert [b.plan.index for b in batches] == [0, 1, 2]
            trained = [o for b in batches for o in b.plan.ordinals]
            assert trained == sorted(set(trained))
            assert set(trained) <= set(ordinals)
            lines = run.metrics()
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
            server = asyncio.ensure_future(Server(run).serve())
            await learn(run, batches=batches)
            await server
            await run.task
            assert [b.plan.ordinals for b in batches] == [[0, 1], [2, 3], [4, 5]]
            assert [m["staleness/max"] for m in run.metrics()] == [0, 0, 0]

    asyncio.run(scenario())


def test_a_silent_server_loses_its_leases_to_another_and_every_prompt_trains_once(tmp_path: Path):
    async def scenario() -> None:
        config = make_config(tmp_path, "max_staleness=0")
        async with running(config) as run, asyncio.timeout(DEADLINE_S):
            batches: list[Batch] = []
            learner = asyncio.ensure_future(learn(run, batches=batches))
            silent = asyncio.ensure_future(Server(run, "silent", leases_before_silence=1).serve())
            await asyncio.sleep(0.5)
            server = asyncio.ensure_future(Server(run, "healthy").serve())
            await learner
            await server
            silent.cancel()
            await asyncio.gather(silent, return_exceptions=True)
            await run.task
            assert [b.plan.ordinals for b in batches] == [[0, 1], [2, 3], [4, 5]]
            assert run.metrics()[-1]["counts/servers_lost"] == 1
            assert any("silent for timeouts.heartbeat_s" in note for note in run.coordinator.status.notes)

    asyncio.run(scenario())


def test_groups_without_a_reward_are_replaced_and_counted(tmp_path: Path):
    # Mutation: a failed reward trained as 0.
    async def scenario() -> None:
        config = make_config(tmp_path, "max_staleness=0")
        async with running(config) as run, asyncio.timeout(DEADLINE_S):
            batches: list[Batch] = []
            server = asyncio.ensure_future(Server(run, reward=lambda o: None if o in (1, 4) else 1.0).serve())
            await learn(run, batches=batches)
            await server
            await run.task
            assert [b.plan.ordinals for b in batches] == [[0, 2], [3, 5], [6, 7]]
            last = run.metrics()[-1]
            assert last["counts/groups_untrainable"] == 2
            assert last["counts/trajectories_reward_failed"] == 4

    asyncio.run(scenario())


def test_a_failed_peer_ends_the_run_with_its_own_words_and_stops_the_others(tmp_path: Path):
    async def scenario() -> None:
        async with running(make_config(tmp_path)) as run, asyncio.timeout(DEADLINE_S):
            server = asyncio.ensure_future(Server(run).serve())
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
                            group = make_group(lease.ordinal, received.prompt_ids, version=9)
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
                            group = make_group(lease.ordinal, received.prompt_ids, version=0)
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
            server = asyncio.ensure_future(Server(run).serve())
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
            ordinals = await Server(run, "healthy").serve()
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
            await Server(run).serve()
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
            server = asyncio.ensure_future(Server(run, says_bye=False).serve())
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
            await asyncio.gather(Server(run).serve(), learn(run), run.task)
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
            server = asyncio.ensure_future(Server(run, reward=lambda ordinal: None).serve())
            learner = asyncio.ensure_future(learn(run))
            with pytest.raises(
                RewardError, match=r"2 groups in a row have no token to train.*KeyError: 'answer'"
            ):
                await run.task
            await asyncio.gather(server, learner, return_exceptions=True)
            assert any(
                "none is scored yet, and 2 such groups end the run" in note and "KeyError: 'answer'" in note
                for note in run.coordinator.status.notes
            )
            kept = (run.path / "trajectories" / "untrainable.jsonl").read_text().splitlines()
            assert [(r["ordinal"], r["sample"]) for r in map(json.loads, kept)][:4] == [
                (0, 0),
                (0, 1),
                (1, 0),
                (1, 1),
            ]
            assert all("KeyError: 'answer'" in json.loads(line)["detail"] for line in kept)

    asyncio.run(scenario())


def test_a_reward_that_has_worked_may_fail_for_four_batches(tmp_path: Path):
    # Mutation: the limit of a reward that never worked, one batch of 2 groups, for one that has.
    async def scenario() -> None:
        config = make_config(tmp_path, "learner.max_versions=6", "max_staleness=8")
        async with running(config) as run, asyncio.timeout(DEADLINE_S):
            reward = lambda ordinal: 1.0 if ordinal in (0, 1, 9, 10) else None  # noqa: E731
            server = asyncio.ensure_future(Server(run, reward=reward).serve())
            learner = asyncio.ensure_future(learn(run))
            with pytest.raises(RewardError, match="8 groups in a row have no token to train"):
                await run.task
            await asyncio.gather(server, learner, return_exceptions=True)
            assert run.coordinator._ledger.num_batches_formed == 2

    asyncio.run(scenario())
