"""Claims about the staleness rules: exact ones, and properties of simulated runs under random adversity."""

from __future__ import annotations

import random
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from staleness_simulation import Observation, Outage, Outcome, Scenario, Server, Simulation

from asyncrl.coordinator.staleness import (
    BatchChoice,
    FinishedGroup,
    OverAge,
    Pacing,
    can_form_batch,
    can_lease,
    choose_batch,
    num_leases_allowed,
    oldest_trained_version,
    token_is_trained,
)

COUNTS = st.integers(0, 40)
ENDLESS = 10**9


# Exact claims.


def test_one_more_group_is_leased_exactly_while_outstanding_plus_batches_stay_below_the_limit():
    # Catches `<` -> `<=`, and S + s_j without + 1: the limit for B=4, S=1, s=2 is 16 groups.
    pacing = Pacing(batch_size=4, max_staleness=1, max_versions=ENDLESS)
    assert can_lease(pacing, outstanding=3, num_batches_formed=3, server_version=2)
    assert not can_lease(pacing, outstanding=4, num_batches_formed=3, server_version=2)
    assert num_leases_allowed(pacing, outstanding=0, num_batches_formed=0, server_version=0) == 8
    assert num_leases_allowed(pacing, outstanding=8, num_batches_formed=3, server_version=0) == 0


@given(st.integers(1, 9), COUNTS, COUNTS, COUNTS, st.integers(-3, 3))
@settings(deadline=None)
def test_pacing_is_the_inequality_of_the_design(
    batch_size: int, max_staleness: int, formed: int, version: int, from_limit: int
):
    # Catches any change of a term of the inequality, and headroom that counts one group too many or few or
    # falls below 0: `outstanding` lies within 3 groups of the limit where it can.
    limit = (max_staleness + version + 1) * batch_size
    outstanding = max(0, limit - formed * batch_size + from_limit)
    pacing = Pacing(batch_size, max_staleness, ENDLESS)
    counts = {"outstanding": outstanding, "num_batches_formed": formed, "server_version": version}
    assert can_lease(pacing, **counts) == (outstanding + formed * batch_size < limit)
    allowed = num_leases_allowed(pacing, **counts)
    assert allowed == max(0, limit - outstanding - formed * batch_size)
    assert can_lease(pacing, **counts) == (allowed > 0)


def test_nothing_is_leased_beyond_the_last_batch():
    # Catches pacing that goes on to S versions beyond the end: 3 batches of 4 are 12 groups, 8 are in batches.
    pacing = Pacing(batch_size=4, max_staleness=2, max_versions=3)
    assert can_lease(pacing, outstanding=3, num_batches_formed=2, server_version=2)
    assert not can_lease(pacing, outstanding=4, num_batches_formed=2, server_version=2)


def test_a_batch_forms_while_at_most_one_waits_for_the_learner():
    # Catches k <= v (no batch ahead) and k <= v + 2 (two ahead).
    assert [can_form_batch(num_batches_formed=k, learner_version=5) for k in (5, 6, 7)] == [True, True, False]


def test_a_token_trains_up_to_and_including_the_bound_under_mask_and_always_under_keep():
    # Catches `k - version < S` and `<= S + 1`: at k=6, S=2 versions 4, 5, 6 train and 3 does not.
    def trained(version: int, over_age: OverAge) -> bool:
        return token_is_trained(batch_index=6, token_version=version, max_staleness=2, over_age=over_age)

    assert [trained(version, "mask") for version in (2, 3, 4, 5, 6)] == [False, False, True, True, True]
    assert all(trained(version, "keep") for version in range(7))
    assert oldest_trained_version(batch_index=6, max_staleness=2, over_age="mask") == 4
    assert oldest_trained_version(batch_index=1, max_staleness=2, over_age="mask") == 0
    assert oldest_trained_version(batch_index=6, max_staleness=2, over_age="keep") == 0


def test_the_oldest_first_versions_make_the_batch_and_ties_go_to_the_lowest_ordinal():
    # Catches a missing tie-break (any order of the input), ordering by ordinal alone, by the newest version,
    # newest first, and a result that is not sorted by ordinal.
    groups = [
        FinishedGroup(ordinal=3, first_version=5, newest_trainable_version=5),
        FinishedGroup(ordinal=9, first_version=4, newest_trainable_version=6),
        FinishedGroup(ordinal=7, first_version=5, newest_trainable_version=5),
        FinishedGroup(ordinal=5, first_version=5, newest_trainable_version=5),
    ]
    for seed in range(24):
        random.Random(seed).shuffle(groups)
        choice = choose_batch(groups, batch_index=6, pacing=Pacing(3, 2, ENDLESS), over_age="mask")
        assert choice == BatchChoice(ordinals=(3, 5, 9), consumed_untrainable=())


def test_groups_without_a_trainable_token_are_consumed_and_do_not_count_towards_the_batch():
    # Catches untrainable groups that count towards B, that are kept, and that are reported only with a batch.
    failed = FinishedGroup(ordinal=1, first_version=6, newest_trainable_version=None)
    over_age = FinishedGroup(ordinal=0, first_version=2, newest_trainable_version=3)
    fine = FinishedGroup(ordinal=2, first_version=3, newest_trainable_version=4)

    def choose(batch_size: int, over_age_rule: OverAge) -> BatchChoice:
        return choose_batch(
            [failed, over_age, fine],
            batch_index=6,
            pacing=Pacing(batch_size, 2, ENDLESS),
            over_age=over_age_rule,
        )

    assert choose(1, "mask") == BatchChoice(ordinals=(2,), consumed_untrainable=(0, 1))
    assert choose(2, "mask") == BatchChoice(ordinals=None, consumed_untrainable=(0, 1))
    assert choose(2, "keep") == BatchChoice(ordinals=(0, 2), consumed_untrainable=(1,))
    assert choose(3, "keep") == BatchChoice(ordinals=None, consumed_untrainable=(1,))


def test_the_worked_example_of_the_docs_holds():
    # docs/staleness.md, B=4, S=1: headroom after each step, and the batches that form.
    pacing = Pacing(batch_size=4, max_staleness=1, max_versions=ENDLESS)

    def headroom(outstanding: int, k: int, s: int) -> int:
        return num_leases_allowed(pacing, outstanding=outstanding, num_batches_formed=k, server_version=s)

    def batch(k: int, *groups: tuple[int, int, int]) -> tuple[int, ...] | None:
        finished = [FinishedGroup(*group) for group in groups]
        return choose_batch(finished, batch_index=k, pacing=pacing, over_age="mask").ordinals

    assert headroom(0, 0, 0) == 8
    assert batch(0, (0, 0, 0), (1, 0, 0), (3, 0, 0), (4, 0, 0)) == (0, 1, 3, 4)
    assert headroom(4, 1, 0) == 0
    assert batch(1, (5, 0, 0), (6, 0, 0), (7, 0, 0)) is None
    assert headroom(4, 1, 1) == 4
    assert batch(1, (5, 0, 0), (6, 0, 0), (7, 0, 0), (8, 1, 1)) == (5, 6, 7, 8)
    assert headroom(4, 2, 1) == 0
    assert headroom(4, 2, 2) == 4
    assert batch(2, (9, 1, 2), (10, 1, 1), (11, 1, 2), (2, 0, 2)) == (2, 9, 10, 11)
    assert oldest_trained_version(batch_index=2, max_staleness=1, over_age="mask") == 1
    assert headroom(4, 3, 2) == 0


# Properties of simulated runs.

OUTAGES = st.builds(
    Outage, at=st.integers(1, 1500), down_ticks=st.integers(1, 200), result_still_comes=st.booleans()
)
SERVERS = st.builds(
    Server,
    joins_at=st.sampled_from([0, 0, 0, 50, 400]),
    num_slots=st.integers(1, 8),
    ticks_per_token=st.integers(1, 4),
    update_ticks=st.sampled_from([0, 1, 10, 60, 300]),
    echo_ticks=st.sampled_from([0, 0, 5, 50]),
    outages=st.lists(OUTAGES, max_size=3).map(tuple),
)


def scenarios(
    *,
    over_ages: tuple[str, ...] = ("mask",),
    max_staleness: tuple[int, ...] = (0, 1, 2, 4),
    failure_shares: tuple[float, ...] = (0.0, 0.1, 0.5),
) -> st.SearchStrategy[Scenario]:
    return st.builds(
        Scenario,
        pacing=st.builds(
            Pacing, st.integers(1, 6), st.sampled_from(max_staleness), st.sampled_from([10, ENDLESS])
        ),
        servers=st.lists(SERVERS, min_size=1, max_size=4).map(tuple),
        num_versions=st.integers(3, 10),
        over_age=st.sampled_from(over_ages),
        mean_length=st.integers(1, 30),
        learner_ticks=st.sampled_from([1, 20, 100, 400]),
        failure_share=st.sampled_from(failure_shares),
        seed=st.integers(0, 2**20),
    )


def deadline_ticks(scenario: Scenario) -> int:
    """A bound on a live run: each version needs the learner, an update in flight and the next one, and then
    the groups granted before and the refills, here all of greatest length and one after another; each outage
    costs its length and the groups it lost. Twelve refills a batch slot leave room for half of them failing.
    """
    servers, pacing = scenario.servers, scenario.pacing
    longest = 6 * scenario.mean_length * max(server.ticks_per_token for server in servers)
    sync = max(server.update_ticks + server.echo_ticks for server in servers)
    num_groups = pacing.batch_size * (pacing.max_staleness + 1 + 12) + 12
    a_version = 2 * (2 * scenario.learner_ticks) + 2 * sync + num_groups * longest
    outages = [outage for server in servers for outage in server.outages]
    an_outage = pacing.batch_size * (pacing.max_staleness + 1) * longest + sync
    lost = sum(outage.down_ticks + an_outage for outage in outages)
    return scenario.num_versions * a_version + lost + max(server.joins_at for server in servers)


def simulate(scenario: Scenario) -> Outcome:
    return Simulation(scenario).run(deadline_ticks(scenario))


def trained_ages(outcome: Outcome) -> list[int]:
    """Staleness of every stretch of tokens that trains."""
    scenario = outcome.scenario
    return [
        batch.index - version
        for batch in outcome.batches
        for runs in batch.runs
        for version, _ in runs
        if token_is_trained(
            batch_index=batch.index,
            token_version=version,
            max_staleness=scenario.pacing.max_staleness,
            over_age="keep" if scenario.over_age == "keep" else "mask",
        )
    ]


MANY = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SOME = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@MANY
@given(scenarios(over_ages=("mask", "keep")))
def test_every_version_trains_in_bounded_time_whatever_the_servers_do(scenario: Scenario):
    # Liveness. Catches pacing without + 1 (S = 0 never starts), untrainable groups that are not consumed
    # (they fill the outstanding set), `k - version < S` (nothing trains at S = 0), and forming at k < v only.
    outcome = simulate(scenario)
    assert outcome.learner_version == scenario.num_versions
    assert [batch.index for batch in outcome.batches][: scenario.num_versions] == list(
        range(scenario.num_versions)
    )
    assert all(len(batch.ordinals) == scenario.pacing.batch_size for batch in outcome.batches)


@MANY
@given(scenarios())
def test_under_mask_no_trained_token_is_older_than_the_bound_and_every_group_trains_some(scenario: Scenario):
    # Safety. Catches `<= S + 1` in token_is_trained, untrainable groups that count towards B, and a batch
    # chosen for another index than its own.
    outcome = simulate(scenario)
    ages = trained_ages(outcome)
    assert ages
    assert min(ages) >= 0
    assert max(ages) <= scenario.pacing.max_staleness
    for batch in outcome.batches:
        for runs in batch.runs:
            assert batch.index - runs[-1][0] <= scenario.pacing.max_staleness


@MANY
@given(scenarios(over_ages=("mask", "keep")))
def test_each_ordinal_is_consumed_at_most_once_and_none_is_lost(scenario: Scenario):
    # Catches a choice that names an ordinal twice or as batch member and untrainable at once, and one that
    # names neither although the group is gone.
    outcome = simulate(scenario)
    trained = [ordinal for batch in outcome.batches for ordinal in batch.ordinals]
    ends = trained + list(outcome.untrainable) + list(outcome.unused)
    assert sorted(ends) == list(range(outcome.num_granted))
    if scenario.over_age == "keep":
        assert all(scenario.fails(ordinal) for ordinal in outcome.untrainable)


@SOME
@given(scenarios(max_staleness=(0,), over_ages=("mask", "keep"), failure_shares=(0.0,)))
def test_with_staleness_zero_batch_i_is_the_next_b_ordinals_all_at_version_i(scenario: Scenario):
    # Catches `<` -> `<=` in pacing (one group too many is leased at the older version).
    outcome = simulate(scenario)
    size = scenario.pacing.batch_size
    for batch in outcome.batches:
        assert batch.ordinals == tuple(range(batch.index * size, (batch.index + 1) * size))
        assert {version for runs in batch.runs for version, _ in runs} == {batch.index}
    assert not outcome.untrainable


@SOME
@given(scenarios(max_staleness=(0,), over_ages=("mask", "keep"), failure_shares=(0.2, 0.5)))
def test_with_staleness_zero_failed_groups_are_refilled_by_the_next_ordinals_at_the_same_version(
    scenario: Scenario,
):
    # Catches the same as above, and failed groups that count towards B.
    outcome = simulate(scenario)
    succeeding = (ordinal for ordinal in range(outcome.num_granted) if not scenario.fails(ordinal))
    for batch in outcome.batches:
        assert batch.ordinals == tuple(next(succeeding) for _ in batch.ordinals)
        assert {version for runs in batch.runs for version, _ in runs} == {batch.index}


@MANY
@given(scenarios(over_ages=("mask", "keep")))
def test_the_work_outstanding_and_the_batches_ahead_stay_bounded(scenario: Scenario):
    # Catches `<` -> `<=` in pacing (one group over), and can_form_batch with v + 2 (k reaches v + 3).
    size, bound = scenario.pacing.batch_size, scenario.pacing.max_staleness
    for seen in simulate(scenario).observations:
        assert seen.v <= seen.k <= seen.v + min(2, bound + 1)
        assert seen.outstanding + seen.lost + seen.k * size <= (bound + seen.v + 1) * size


def test_the_bounds_are_reached():
    # The properties above are about something: a slow learner meets both limits. Catches a stricter pacing
    # (S instead of S + 1 batches of work) and can_form_batch with v (never a batch ahead).
    scenario = Scenario(
        Pacing(batch_size=4, max_staleness=2, max_versions=ENDLESS),
        (Server(num_slots=20),),
        num_versions=6,
        learner_ticks=1000,
    )
    seen = simulate(scenario).observations
    assert Observation(v=0, k=0, outstanding=12, lost=0) in seen
    assert Observation(v=3, k=5, outstanding=4, lost=0) in seen


def long_tailed(over_age: Literal["mask", "drop"], max_staleness: int) -> Scenario:
    """B = 64, 64 in flight, learner as fast as generation, mean length 1000."""
    return Scenario(
        pacing=Pacing(64, max_staleness, ENDLESS),
        servers=(Server(num_slots=64),),
        num_versions=30,
        over_age=over_age,
        mean_length=1000,
        learner_ticks=1000,
    )


@pytest.mark.parametrize(("over_age", "least", "most"), [("mask", 0.95, 1.02), ("drop", 0.5, 0.85)])
def test_mask_trains_answers_of_the_length_that_was_drawn_and_drop_would_not(
    over_age: Literal["mask", "drop"], least: float, most: float
):
    # Catches consuming a group whose first token is over age (judging by first_version): short answers win.
    scenario = long_tailed(over_age, max_staleness=1)
    outcome = simulate(scenario)
    lengths = [scenario.length(ordinal) for batch in outcome.batches for ordinal in batch.ordinals]
    drawn = [scenario.length(ordinal) for ordinal in range(outcome.num_granted)]
    assert least < (sum(lengths) / len(lengths)) / (sum(drawn) / len(drawn)) < most
