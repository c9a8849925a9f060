"""The ledger: every ordinal is leased, finished and consumed as its life-cycle says, whatever gets lost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from test_batches import group, trajectory

from asyncrl.coordinator.ledger import Consumed, Ledger, Verdict
from asyncrl.coordinator.staleness import Pacing

ENDLESS = 10**9
A, B = b"a", b"b"


def ledger(batch_size: int = 2, max_staleness: int = 0) -> Ledger:
    return Ledger(Pacing(batch_size, max_staleness, ENDLESS), "mask")


def finished(ordinal: int, version: int = 0, reward: float | None = 1.0):
    return group(ordinal, trajectory([version], reward), trajectory([version], reward))


def test_leases_go_out_in_order_until_pacing_stops_them():
    book = ledger(batch_size=2, max_staleness=1)
    granted = [book.grant(A, server_version=0) for _ in range(5)]
    assert [lease.ordinal if lease else None for lease in granted] == [0, 1, 2, 3, None]


def test_a_lost_lease_is_granted_again_lowest_ordinal_first():
    # Mutation: a plain list for the lost ordinals, or new ordinals before lost ones.
    book = ledger(batch_size=4)
    for _ in range(4):
        book.grant(A, 0)
    assert book.lose_server(A) == [0, 1, 2, 3]
    assert book.outstanding == 0
    again = [book.grant(B, 0) for _ in range(4)]
    assert [lease.ordinal for lease in again if lease] == [0, 1, 2, 3]
    assert book.counts["leases_lost"] == 4


def test_the_first_result_wins_and_later_ones_are_duplicates():
    book = ledger()
    book.grant(A, 0)
    book.lose_server(A)
    book.grant(B, 0)
    assert book.accept(finished(0)) is Verdict.ACCEPTED
    assert book.accept(finished(0)) is Verdict.DUPLICATE
    assert book.num_finished == 1


def test_a_filtered_group_makes_room_for_the_next_and_is_a_duplicate_when_it_comes_again():
    # Mutations: not consumed (its second copy is looked for among the lost leases); still outstanding.
    book = ledger(batch_size=1)
    book.grant(A, 0)
    assert book.grant(A, 0) is None
    assert book.accept(finished(0), is_filtered=True) is Verdict.ACCEPTED
    assert (book.outstanding, book.num_filtered_in_a_row, book.consumed.frontier) == (0, 1, 1)
    assert book.accept(finished(0), is_filtered=True) is Verdict.DUPLICATE
    lease = book.grant(A, 0)
    assert lease is not None
    assert lease.ordinal == 1
    assert [one.ordinal for one in book.take_untrainable()] == [0]
    assert book.accept(finished(1)) is Verdict.ACCEPTED
    assert (book.num_filtered_in_a_row, book.counts["groups_filtered"]) == (0, 1)


def test_a_result_of_a_lost_lease_counts_and_is_not_leased_again():
    # Mutation: leaving the ordinal in the lost heap trains it twice.
    book = ledger()
    book.grant(A, 0)
    book.lose_server(A)
    assert book.accept(finished(0)) is Verdict.ACCEPTED
    lease = book.grant(B, 0)
    assert lease is not None
    assert lease.ordinal == 1


def test_a_group_that_was_never_leased_is_unknown():
    assert ledger().accept(finished(7)) is Verdict.UNKNOWN


def test_a_batch_forms_from_b_trainable_groups_and_duplicates_of_it_stay_out():
    book = ledger()
    for _ in range(2):
        book.grant(A, 0)
    book.accept(finished(1))
    assert book.form_batch() is None
    book.accept(finished(0))
    batch = book.form_batch()
    assert batch is not None
    assert [g.ordinal for g in batch] == [0, 1]
    assert book.num_batches_formed == 1
    assert book.outstanding == 0
    assert book.accept(finished(1)) is Verdict.DUPLICATE


def test_a_group_whose_rollouts_all_failed_is_consumed_and_replaced_by_the_next_ordinal():
    # Mutation: counting it towards the batch, or leaving it outstanding (pacing would never refill).
    book = ledger()
    for _ in range(2):
        book.grant(A, 0)
    book.accept(finished(0, reward=None))
    assert book.counts["groups_untrainable"] == 1
    replacement = book.grant(A, 0)
    assert replacement is not None
    assert replacement.ordinal == 2
    book.accept(finished(1))
    book.accept(finished(2))
    batch = book.form_batch()
    assert batch is not None
    assert [g.ordinal for g in batch] == [1, 2]


def test_consumed_ordinals_take_no_memory_behind_the_frontier():
    consumed = Consumed()
    for ordinal in (2, 1, 0, 4):
        consumed.add(ordinal)
    assert consumed.frontier == 3
    assert consumed.beyond == {4}
    assert [o in consumed for o in range(6)] == [True, True, True, False, True, False]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_ordinal_is_consumed_at_most_once_through_any_losses(data: st.DataObject):
    # Mutation: lose() that forgets to free the server's set, accept() that ignores the consumed set.
    book = ledger(batch_size=3, max_staleness=1)
    version = 0
    trained: list[int] = []
    for _ in range(120):
        server = data.draw(st.sampled_from([A, B]))
        match data.draw(st.sampled_from(["grant", "finish", "finish", "lose", "late", "form"])):
            case "grant":
                book.grant(server, version)
            case "finish" if leases := book.leases_of(server):
                lease = data.draw(st.sampled_from(leases))
                failed = data.draw(st.booleans()) and data.draw(st.booleans())
                book.accept(finished(lease.ordinal, version, None if failed else 1.0))
            case "lose":
                book.lose_server(server)
            case "late":
                book.accept(finished(data.draw(st.integers(0, 40)), version))
            case "form" if (batch := book.form_batch()) is not None:
                trained += [g.ordinal for g in batch]
                version = book.num_batches_formed
    assert len(trained) == len(set(trained))
    assert all(ordinal in book.consumed for ordinal in trained)
    assert book.outstanding == book.num_leased + book.num_finished


def test_a_refused_result_is_leased_anew_three_times_and_then_left_out():
    # Mutations: never given up (the same seed samples the same group for ever); given up at once.
    book = ledger()
    given_up = []
    for _ in range(3):
        lease = book.grant(A, 0)
        assert lease is not None
        assert lease.ordinal == 0
        given_up.append(book.refuse(0, A))
    assert given_up == [False, False, True]
    assert 0 in book.consumed
    assert book.refuse(0, A) is False
    assert book.counts["groups_untrainable"] == 1
    lease = book.grant(A, 0)
    assert lease is not None
    assert lease.ordinal == 1


def test_groups_without_a_trainable_token_are_counted_in_a_row():
    book = ledger(batch_size=4)
    for _ in range(4):
        book.grant(A, 0)
    counted = []
    for ordinal, reward in enumerate([None, None, 1.0, None]):
        book.accept(finished(ordinal, reward=reward))
        counted.append(book.num_untrainable_in_a_row)
    assert counted == [1, 2, 0, 1]
