"""Which prompt of which version goes to which server, what keeps a server at a version, and what is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config import EvalConfig
from asyncrl.coordinator.evaluation import Evaluations
from asyncrl.coordinator.servers import ServerState
from asyncrl.envs.order import eval_seed, request_seed
from asyncrl.types import TrajectoryGroup


def evaluations(num_prompts: int = 3, *, every: int = 2, max_versions: int = 5) -> Evaluations:
    return Evaluations(EvalConfig(every=every), num_prompts=num_prompts, max_versions=max_versions)


def server(name: str = "a", version: int | None = 0, offered: int | None = None) -> ServerState:
    state = ServerState(name.encode(), name, 4, last_heard_s=0.0, last_step_s=0.0)
    state.version, state.offered = version, version if offered is None else offered
    return state


def result(row_index: int) -> TrajectoryGroup:
    return TrajectoryGroup(row_index, 0, np.ones(1, np.int32), [])


def accept(of: Evaluations, version: int, row_index: int) -> bool:
    """Takes a result in as EvalSide does."""
    if not of.awaits(version, row_index):
        return False
    of.live[version].finish(row_index, result(row_index))
    return True


def grant(of: Evaluations, to: ServerState) -> int:
    granted = of.grant(to)
    assert granted is not None
    return granted[1]


@pytest.mark.parametrize(
    ("every", "due"), [(0, []), (1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (5, [0, 5]), (9, [0, 5])]
)
def test_versions_are_evaluated_before_training_every_so_often_and_at_the_end(every: int, due: list[int]):
    # Mutations: the last version only when it is a multiple; version 0 left out.
    made = evaluations(every=every)
    assert [version for version in range(6) if made.is_due(version)] == due


def test_only_a_server_at_the_version_that_was_offered_nothing_newer_takes_part():
    # Mutation: `version ==` alone: a server that is about to apply the next version would mix the two.
    made = evaluations()
    made.published(2, 0.0)
    assert made.grant(server("behind", version=1, offered=2)) is None
    assert made.grant(server("ahead", version=3)) is None
    assert made.grant(server("leaving", version=2, offered=3)) is None
    assert made.grant(server("new", version=None, offered=2)) is None
    assert made.grant(server("at", version=2)) is not None


def test_a_server_is_kept_until_nothing_waits_and_it_holds_nothing():
    # Mutations: kept only while it holds a lease; kept until the whole evaluation is done.
    made, first, second = evaluations(num_prompts=2), server("a"), server("b")
    made.published(0, 0.0)
    assert made.keeps(first), "prompts wait for it"
    rows = [grant(made, first), grant(made, second)]
    assert made.keeps(first)
    assert made.keeps(second)
    accept(made, 0, rows[0])
    assert not made.keeps(first), "it has done its share"
    assert made.keeps(second)
    assert not made.keeps(server("late", version=0, offered=1))


def test_the_snapshot_of_an_evaluated_version_is_needed_until_somebody_serves_it():
    # Mutation: needed for as long as the evaluation lasts, which would stop the learner.
    made = evaluations()
    made.published(2, 0.0)
    waiting = server("a", version=1, offered=2)
    assert made.needs_snapshot(2, [waiting])
    assert made.needs_snapshot(2, [])
    assert not made.needs_snapshot(3, [waiting])
    assert not made.needs_snapshot(2, [waiting, server("b", version=2)])


def test_leases_of_a_lost_server_are_granted_first_to_the_others_at_the_version():
    made, lost, other = evaluations(), server("lost"), server("other")
    made.published(0, 0.0)
    rows = [grant(made, lost), grant(made, lost)]
    assert made.lose_server(lost.peer) == 2
    assert sorted([grant(made, other), grant(made, other)]) == rows
    assert grant(made, other) == 2
    assert made.num_leases_of(lost.peer) == 0


def test_a_lease_that_two_heartbeats_in_a_row_do_not_list_is_lost():
    # Mutation: lost at the first, although the lease may have crossed the heartbeat on the way.
    made, of = evaluations(), server()
    made.published(0, 0.0)
    rows = [grant(made, of), grant(made, of)]
    assert made.find_missing(of.peer, [(0, rows[0])]) == 0
    assert made.find_missing(of.peer, [(0, rows[0]), (0, rows[1])]) == 0
    assert made.find_missing(of.peer, [(0, rows[0])]) == 0
    assert made.find_missing(of.peer, [(0, rows[0]), (1, rows[1])]) == 1
    assert made.num_leases_of(of.peer) == 1


def test_the_first_result_of_a_prompt_wins_and_strangers_are_ignored():
    made, of = evaluations(num_prompts=2), server()
    made.published(0, 0.0)
    row = grant(made, of)
    assert accept(made, 0, row)
    assert not accept(made, 0, row)
    assert not accept(made, 0, 2)
    assert not accept(made, 1, 0)
    grant(made, of)
    made.lose_server(of.peer)
    assert accept(made, 0, 1), "its lease was lost, and the result came all the same"
    assert [e.version for e in made.take_ended(0.0)] == [0]
    assert made.live == {}


def test_an_evaluation_that_nobody_can_go_on_with_is_cut_and_one_with_a_snapshot_waits():
    # Mutation: cut as soon as no server is there, although one may join and apply the snapshot.
    made, of = evaluations(), server("a", version=2)
    made.published(2, 0.0)
    made.cut_out_of_reach(2, [])
    made.cut_out_of_reach(3, [of])
    assert made.take_ended(0.0) == []
    made.cut_out_of_reach(3, [server("b", version=3)])
    ended = made.take_ended(0.0)
    assert [e.cut for e in ended] == ["no server is at version 2, and its snapshot is gone"]


def test_an_evaluation_past_its_deadline_is_cut_with_how_far_it_came():
    made, of = evaluations(), server()
    made.published(0, 10.0)
    accept(made, 0, grant(made, of))
    made.live[0].began_s = 30.0
    made.cut_overdue(90.0, 60.0)
    assert made.take_ended(0.0) == []
    made.cut_overdue(90.1, 60.0)
    assert "1 of 3 prompts were done within timeouts.eval_s = 60 s" in made.take_ended(0.0)[0].cut


def test_an_evaluation_that_does_not_begin_is_cut_too():
    # Mutation: the deadline only once it has begun.
    made = evaluations()
    made.published(0, 10.0)
    made.cut_overdue(70.1, 60.0)
    assert "0 of 3 prompts" in made.take_ended(0.0)[0].cut


def test_a_complete_evaluation_is_never_cut():
    made, of = evaluations(num_prompts=1), server()
    made.published(0, 0.0)
    accept(made, 0, grant(made, of))
    made.cut_overdue(1000.0, 1.0)
    made.cut_out_of_reach(5, [])
    made.cut_all("the end")
    assert [(e.is_complete, e.cut) for e in made.take_ended(0.0)] == [(True, "")]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_prompt_is_evaluated_exactly_once_whatever_is_lost(data: st.DataObject):
    # Mutation: a lost prompt granted again while its first result has come.
    made = evaluations(num_prompts=5)
    made.published(0, 0.0)
    servers = [server("a"), server("b")]
    finished: list[int] = []
    for _ in range(200):
        if not made.live or made.live[0].is_complete:
            break
        of = data.draw(st.sampled_from(servers))
        match data.draw(st.sampled_from(["grant", "grant", "finish", "finish", "lose"])):
            case "grant":
                made.grant(of)
            case "lose":
                made.lose_server(of.peer)
            case _:
                leased = list(made.live[0].leases_of(of.peer))
                if leased and accept(made, 0, row := data.draw(st.sampled_from(leased))):
                    finished.append(row)
        evaluation = made.live[0]
        places = [*evaluation.waiting, *evaluation.holders, *evaluation.finished]
        assert sorted(places) == [0, 1, 2, 3, 4]
    assert len(finished) == len(set(finished))


def test_seeds_of_evaluations_differ_by_everything_and_from_those_of_training():
    # Mutation: the version left out: every evaluation of one row would sample the same tokens' luck.
    base = (3, 2, 1, 0)
    others = [(4, 2, 1, 0), (3, 3, 1, 0), (3, 2, 2, 0), (3, 2, 1, 1)]
    seeds = {eval_seed(*numbers) for numbers in [base, *others]}
    assert len(seeds) == 5
    assert eval_seed(*base) == eval_seed(*base)
    assert eval_seed(*base) != request_seed(*base)
    assert all(0 <= seed < 2**63 for seed in seeds)
