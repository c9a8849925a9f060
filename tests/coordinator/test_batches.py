"""What still trains in a batch, and how it is spread over ranks and microbatches."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.coordinator.batches import (
    batch_metrics,
    component_means,
    describe_finished,
    mask_group,
    plan_batch,
)
from asyncrl.types import Plan, Status, Trajectory, TrajectoryGroup


def trajectory(
    versions: list[int], reward: float | None = 1.0, mask: list[int] | None = None, finish: str = "stop"
) -> Trajectory:
    length = len(versions)
    return Trajectory(
        np.arange(length, dtype=np.int32),
        np.array(mask if mask is not None else [1] * length, np.uint8),
        np.full(length, -1.0, np.float32),
        np.array(versions, np.int32),
        reward,
        Status.SCORED if reward is not None else Status.REWARD_FAILED,
        finish,
    )


def group(ordinal: int, *trajectories: Trajectory, prompt: int = 3) -> TrajectoryGroup:
    return TrajectoryGroup(ordinal, 0, np.zeros(prompt, np.int32), list(trajectories))


def test_mask_takes_out_exactly_the_tokens_older_than_the_bound():
    # Mutations: >= for > (masks age S too); masking whole trajectories; keeping the reward out.
    old = group(0, trajectory([2, 3, 4, 5]), trajectory([5, 5]))
    masked = mask_group(old, batch_index=5, max_staleness=2, over_age="mask")
    assert [t.loss_mask.tolist() for t in masked.group.trajectories] == [[0, 1, 1, 1], [1, 1]]
    assert masked.num_masked_tokens == 1
    assert [t.reward for t in masked.group.trajectories] == [1.0, 1.0]
    assert old.trajectories[0].loss_mask.tolist() == [1, 1, 1, 1]


def test_a_trajectory_that_age_leaves_no_token_is_counted_as_aged_out():
    # Mutations: counting those that were masked before, those of which a token is left, or failed rollouts.
    aged = group(
        0,
        trajectory([0, 1]),
        trajectory([1, 5]),
        trajectory([0, 1], mask=[0, 0]),
        trajectory([0], reward=None),
    )
    assert mask_group(aged, batch_index=5, max_staleness=2, over_age="mask").num_aged_out == 1
    assert mask_group(aged, batch_index=5, max_staleness=2, over_age="keep").num_aged_out == 0


def test_keep_trains_tokens_of_any_age():
    masked = mask_group(group(0, trajectory([0, 9])), batch_index=9, max_staleness=1, over_age="keep")
    assert masked.group.trajectories[0].loss_mask.tolist() == [1, 1]
    assert masked.num_masked_tokens == 0


def test_a_rollout_without_a_reward_trains_nothing_and_is_not_counted_as_masked_by_age():
    # Mutation: treating a missing reward as 0 and training on it.
    masked = mask_group(
        group(0, trajectory([0, 0], reward=None)), batch_index=0, max_staleness=2, over_age="mask"
    )
    assert masked.group.trajectories[0].loss_mask.tolist() == [0, 0]
    assert masked.num_masked_tokens == 0


def test_describe_finished_ignores_masked_and_unscored_tokens():
    # Mutation: taking the newest version over all tokens.
    described = describe_finished(
        group(4, trajectory([1, 7], mask=[1, 0]), trajectory([0, 9], reward=None), trajectory([]))
    )
    assert (described.ordinal, described.first_version, described.newest_trainable_version) == (4, 0, 1)
    assert describe_finished(group(5, trajectory([3], reward=None))).newest_trainable_version is None


@given(
    lengths=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4), min_size=1, max_size=12),
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(10, 200),
    num_minibatches=st.integers(1, 5),
)
@settings(max_examples=200, deadline=None)
def test_a_plan_holds_every_group_once_within_the_budget_equally_many_microbatches_a_rank(
    lengths: list[list[int]], num_ranks: int, max_tokens: int, num_minibatches: int
):
    # Mutations: padding forgotten, or done for the first mini-batch only (ranks would hang in a collective);
    # budget checked after adding; mini-batches cut by ceil(groups / mini-batches), which leaves the last one empty.
    num_minibatches = min(num_minibatches, len(lengths))
    groups = [group(i, *(trajectory([0] * n) for n in of_group)) for i, of_group in enumerate(lengths)]
    plan = plan_batch(
        0, groups, num_ranks=num_ranks, max_tokens=max_tokens, num_minibatches=num_minibatches, num_epochs=3
    )
    assert (len(plan.minibatches), plan.num_epochs, plan.num_ranks) == (num_minibatches, 3, num_ranks)
    sizes, placed = [], []
    for minibatch in plan.minibatches:
        assert len(minibatch) == num_ranks
        assert len({len(of_rank) for of_rank in minibatch}) == 1
        assert minibatch[0]
        for microbatch in (m for of_rank in minibatch for m in of_rank):
            tokens = sum(groups[p].num_tokens for p in microbatch)
            assert tokens <= max_tokens or len(microbatch) == 1
        positions = [p for of_rank in minibatch for m in of_rank for p in m]
        sizes.append(len(positions))
        placed += positions
    assert sorted(placed) == list(range(len(groups)))
    assert max(sizes) - min(sizes) <= 1
    assert plan.total_trained_tokens == sum(sum(of_group) for of_group in lengths)
    assert plan.total_trained_tokens == sum(plan.num_trained_tokens_of(i) for i in range(num_minibatches))
    of_ranks = [plan.positions_of(rank) for rank in range(num_ranks)]
    assert sorted(p for of_rank in of_ranks for p in of_rank) == list(range(len(groups)))


@given(num_groups=st.integers(1, 9), num_ranks=st.integers(1, 3), num_minibatches=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_which_groups_share_a_step_depends_on_neither_ranks_nor_budget(
    num_groups: int, num_ranks: int, num_minibatches: int
):
    # Mutation: mini-batches made of each rank's groups.
    groups = [group(i, trajectory([0] * (7 * i % 5 + 1))) for i in range(num_groups)]

    def steps(num_ranks: int, max_tokens: int) -> list[set[int]]:
        plan = plan_batch(
            0, groups, num_ranks=num_ranks, max_tokens=max_tokens, num_minibatches=num_minibatches
        )
        return [{p for of_rank in m for microbatch in of_rank for p in microbatch} for m in plan.minibatches]

    assert steps(num_ranks, 8) == steps(1, 1000)


def test_groups_are_dealt_to_mini_batches_in_turn():
    # Mutation: consecutive groups, which would put the oldest into the first step.
    groups = [group(i, trajectory([0])) for i in range(5)]
    plan = plan_batch(0, groups, num_ranks=1, max_tokens=1000, num_minibatches=2)
    assert plan.minibatches == [[[[0, 2, 4]]], [[[1, 3]]]]
    assert plan.positions_of(0) == [0, 2, 4, 1, 3]


def test_a_shuffled_deal_is_a_function_of_seed_and_batch_and_keeps_the_sizes():
    # Mutations: a generator that goes on from batch to batch; the same order in every batch; ranks or microbatches
    # that get the shuffled order as well, which the balance would not survive.
    groups = [group(i, trajectory([0] * (3 * i % 7 + 1))) for i in range(11)]

    def dealt(index: int, seed: int | None, num_ranks: int = 1) -> list[set[int]]:
        plan = plan_batch(
            index, groups, num_ranks=num_ranks, max_tokens=30, num_minibatches=3, shuffle_seed=seed
        )
        for minibatch in plan.minibatches:
            assert all(microbatch == sorted(microbatch) for of_rank in minibatch for microbatch in of_rank)
        return [{p for of_rank in m for microbatch in of_rank for p in microbatch} for m in plan.minibatches]

    assert dealt(4, 7) == dealt(4, 7) == dealt(4, 7, num_ranks=3)
    assert dealt(4, 7) not in (dealt(5, 7), dealt(4, 8), dealt(4, None))
    assert [len(part) for part in dealt(4, 7)] == [4, 4, 3]
    assert set.union(*dealt(4, 7)) == set(range(11))
    several = {p for index in range(30) for p in dealt(index, 7)[0]}
    assert several == set(range(11))


@given(
    lengths=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4), min_size=1, max_size=12),
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(10, 200),
    seed=st.none() | st.integers(0, 2**63 - 1),
)
@settings(max_examples=50, deadline=None)
def test_a_plan_is_the_same_in_every_process(
    lengths: list[list[int]], num_ranks: int, max_tokens: int, seed: int | None
):
    # Mutation: ties of the balance broken by identity or hash.
    def planned() -> Plan:
        groups = [group(i, *(trajectory([0] * n) for n in of_group)) for i, of_group in enumerate(lengths)]
        return plan_batch(3, groups, num_ranks=num_ranks, max_tokens=max_tokens, shuffle_seed=seed)

    assert planned() == planned()
    assert planned().digest == planned().digest


def test_what_no_weights_sampled_does_not_make_a_group_older():
    # Mutation: the oldest version over observations too, which have none (-1).
    turns = group(1, trajectory([-1, 4, 4, -1], mask=[0, 1, 1, 0]), trajectory([-1], mask=[0]))
    assert turns.first_version == describe_finished(turns).first_version == 4
    assert group(1, trajectory([-1], mask=[0])).first_version == 0


def test_ranks_are_balanced_by_tokens_not_by_number_of_groups():
    # Mutation: round robin gives rank 0 the two long groups.
    groups = [group(i, trajectory([0] * n)) for i, n in enumerate([90, 10, 90, 10])]
    plan = plan_batch(0, groups, num_ranks=2, max_tokens=1000)
    assert [sum(groups[p].num_tokens for p in plan.positions_of(rank)) for rank in range(2)] == [106, 106]


def test_ranks_are_balanced_within_every_mini_batch():
    # Mutation: balanced over the batch only: rank 0 would wait in the first step and rank 1 in the second.
    groups = [group(i, trajectory([0] * n)) for i, n in enumerate([90, 10, 80, 20, 10, 30])]
    plan = plan_batch(0, groups, num_ranks=2, max_tokens=1000, num_minibatches=2)
    loads = [
        [sum(groups[p].num_tokens for microbatch in of_rank for p in microbatch) for of_rank in minibatch]
        for minibatch in plan.minibatches
    ]
    assert loads == [[93, 96], [33, 36]]


def test_the_digest_changes_with_anything_in_the_plan_and_is_63_bits():
    groups = [group(i, trajectory([0, 0])) for i in range(4)]

    def planned(index: int = 0, **changes: int) -> Plan:
        return plan_batch(index, groups, **({"num_ranks": 1, "max_tokens": 100} | changes))

    plans = [planned(), planned(1), planned(num_minibatches=2), planned(num_epochs=2), planned(max_tokens=5)]
    assert len({plan.digest for plan in plans}) == len(plans)
    assert all(0 <= plan.digest < 2**63 for plan in plans)
    assert planned().digest == plans[0].digest


def test_the_digest_of_a_plan_that_travelled_is_the_same():
    # Mutation: a digest of Python's hash or of the object's identity, which another process has not.
    groups = [group(i, trajectory([0, 0], reward=None if i == 2 else 0.1)) for i in range(4)]
    plan = plan_batch(3, groups, num_ranks=2, max_tokens=100, num_minibatches=2, num_epochs=2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan).digest == plan.digest


def test_metrics_of_a_batch_by_hand():
    # Mutations: mean of group means (0.5 for 2/3 here); staleness averaged by trajectory; failed counted as 0.
    first = group(0, trajectory([4, 4], reward=1.0), trajectory([3, 4, 4, 4], reward=0.0, finish="length"))
    second = group(1, trajectory([4], reward=None), trajectory([4], reward=1.0), prompt=5)
    masked = [mask_group(g, batch_index=4, max_staleness=0, over_age="mask") for g in (first, second)]
    plan = plan_batch(4, [m.group for m in masked], num_ranks=1, max_tokens=100)
    metrics = batch_metrics(plan, masked)
    assert metrics["critic/score/mean"] == pytest.approx(2 / 3)
    assert metrics["response_length/mean"] == 2.0
    assert metrics["response_length/clip_ratio"] == 0.25
    assert metrics["prompt_length/mean"] == 4.0
    assert metrics["staleness/mean"] == 0.0
    assert metrics["staleness/masked_share"] == pytest.approx(1 / 7)
    assert metrics["rollout/failed"] == 1.0
    assert metrics["rollout/equal_reward_groups"] == 1.0
    assert metrics["batch/trained_tokens"] == 6.0
    assert metrics["global_seqlen/max"] == 16.0


def test_each_reward_has_a_mean_over_the_trajectories_that_it_applied_to():
    # Mutations: divided by all trajectories, as if a reward that does not apply were a 0; a mean of answers.
    made = [trajectory([1]) for _ in range(3)]
    made[0].reward_components = {"a": 1.0, "b": 4.0, "b/acc": 0.5, "b/pred": 72.0}
    made[1].reward_components = {"a": 3.0}
    assert component_means(made) == {"reward/a/mean": 2.0, "reward/b/acc/mean": 0.5, "reward/b/mean": 4.0}
