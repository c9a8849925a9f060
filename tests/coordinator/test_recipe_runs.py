"""What the coordinator does for a recipe, over real sockets: filters, shapes, greedy rollouts, components."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_peers import Server, learn, make_group
from scripted_run import DEADLINE_S, Run, make_config, running

from asyncrl.errors import RewardError
from asyncrl.stream.messages import Batch, Lease
from asyncrl.types import Plan, Trajectory, TrajectoryGroup

Rewards = Sequence[float | None]


def rolls_out(
    rewards: Callable[[int], Rewards],
    leases: list[Lease] | None = None,
    finish: str = "stop",
    lengths: Sequence[int] = (2, 2, 2),
) -> Callable[[Lease, np.ndarray, int], TrajectoryGroup]:
    """Groups with these rewards, one a request, of these lengths."""

    def roll_out(lease: Lease, prompt_ids: np.ndarray, version: int) -> TrajectoryGroup:
        if leases is not None:
            leases.append(lease)
        made: list[Trajectory] = []
        for reward, length, _ in zip(rewards(lease.ordinal), lengths, lease.seeds, strict=False):
            [one] = make_group(0, prompt_ids, version=version, reward=reward, num_samples=1).trajectories
            made.append(
                replace(
                    one,
                    token_ids=np.ones(length, np.int32),
                    loss_mask=np.ones(length, np.uint8),
                    rollout_logprobs=np.full(length, -0.5, np.float32),
                    policy_versions=np.full(length, version, np.int32),
                    finish_reason=finish,
                    reward_components={} if reward is None else {"exact_match": reward},
                )
            )
        return TrajectoryGroup(lease.ordinal, 0, prompt_ids, made)

    return roll_out


def trained(
    tmp_path: Path, *overrides: str, look: Callable[[Run], object] = lambda run: None, **server: Any
) -> tuple[list[Plan], list[dict[str, float]]]:
    """(plans, metrics) of a whole run with one scripted server; `look` is called at its end."""
    batches: list[Batch] = []

    async def scenario() -> list[dict[str, float]]:
        async with running(make_config(tmp_path, *overrides)) as run, asyncio.timeout(DEADLINE_S):
            served = asyncio.ensure_future(Server(run, **server).serve())
            try:
                await learn(run, batches=batches)
                await served
                await run.task
            except BaseException:
                await asyncio.gather(served, return_exceptions=True)
                await run.task  # the first cause
                raise
            look(run)
            return run.metrics()

    metrics = asyncio.run(scenario())
    return [batch.plan for batch in batches], metrics


def mixed(ordinal: int) -> Rewards:
    return (1.0, 0.0, 0.5)


# Mutations caught: a filter on the batch instead of on admission (batches of one group); filtered groups that stay
# outstanding (nothing is leased any more); a filtered ordinal leased again.
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_filtered_groups_are_replaced_by_the_next_ordinals_at_once(tmp_path: Path, max_staleness: int):
    def rewards(ordinal: int) -> Rewards:
        return (1.0, 1.0) if ordinal in (1, 2, 4, 5, 6) else (1.0, 0.0)

    def look(run: Run) -> None:
        lines = (run.path / "trajectories" / "untrainable.jsonl").read_text().splitlines()
        assert {1, 2} <= {json.loads(line)["ordinal"] for line in lines} <= {1, 2, 4, 5, 6}
        assert len(lines) + run.coordinator.status.counts["untrainable_not_written"] == 10

    plans, metrics = trained(
        tmp_path,
        "algorithm=dapo",
        f"max_staleness={max_staleness}",
        roll_out=rolls_out(rewards),
        look=look,
    )
    assert [plan.ordinals for plan in plans] == [[0, 3], [7, 8], [9, 10]]
    assert all(line["staleness/max"] <= max_staleness for line in metrics)
    assert metrics[-1]["counts/groups_filtered"] == 5
    assert "counts/groups_untrainable" not in metrics[-1]
    assert metrics[-1]["rollout/equal_reward_groups"] == 0


# Mutations caught: a file without a limit; one of the whole run, which nothing after its first version would enter; a
# limit of groups for one of trajectories; what is left out not counted; the note missing, said at every group, or said
# where the user wants no such file.
@pytest.mark.parametrize(("limit", "num_a_version"), [("all", 4), (3, 3), (9, 4), (0, 0)])
def test_the_file_of_filtered_groups_has_the_first_of_every_version_and_the_rest_is_counted(
    tmp_path: Path, limit: int | str, num_a_version: int
):
    kept = {3, 4, 8, 9}  # before them, and so before each version, 3 groups of 2 are filtered

    def look(run: Run) -> None:
        file = run.path / "trajectories" / "untrainable.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        found = [(record["ordinal"], record["sample"]) for record in map(json.loads, lines)]
        first, second = ([(o, s) for o in ordinals for s in (0, 1)] for ordinals in ((0, 1, 2), (5, 6, 7)))
        assert found == first[:num_a_version] + second[:num_a_version]
        said = [note for note in run.coordinator.status.notes if "untrainable.jsonl has the first" in note]
        assert [note.split(" trajectories of")[0].split()[-1] for note in said] == [
            str(num_a_version)
        ] * bool(num_a_version)

    _, metrics = trained(
        tmp_path,
        "algorithm=dapo",
        "learner.max_versions=2",
        "max_staleness=0",
        f"run.trajectories_per_version={limit}",
        roll_out=rolls_out(lambda ordinal: (1.0, float(ordinal not in kept))),
        look=look,
    )
    assert metrics[-1]["counts/untrainable_not_written"] == 12 - 2 * num_a_version


def test_a_run_whose_groups_are_all_filtered_ends_with_the_budget(tmp_path: Path):
    # Mutations caught: prompts drawn for ever; filtered groups counted as failed rewards.
    with pytest.raises(
        RewardError,
        match=r"left out 6 groups in a row .*max_filtered_batches 3 x .*too easy or too .*untrainable\.jsonl",
    ):
        trained(
            tmp_path,
            "algorithm={type: dapo, max_filtered_batches: 3}",
            roll_out=rolls_out(lambda _: (1.0, 1.0)),
        )


def test_filtered_groups_far_apart_do_not_end_a_run(tmp_path: Path):
    # Mutation caught: a count that no kept group resets.
    plans, metrics = trained(
        tmp_path,
        "algorithm={type: dapo, max_filtered_batches: 1}",
        roll_out=rolls_out(lambda ordinal: (1.0, float(ordinal % 2))),
    )
    assert [plan.ordinals for plan in plans] == [[0, 2], [4, 6], [8, 10]]
    assert metrics[-1]["counts/groups_filtered"] >= 5


def test_plans_have_the_shaped_reward_and_files_the_raw_one(tmp_path: Path):
    # Mutation caught: the reward itself replaced.
    def look(run: Run) -> None:
        lines = (run.path / "trajectories" / "version_000001.jsonl").read_text().splitlines()
        assert [json.loads(line)["reward"] for line in lines] == [1.0, 0.0] * 2

    plans, metrics = trained(
        tmp_path,
        "algorithm={type: dapo, shaping: {overlong: {max_tokens: 10, buffer_tokens: 4}}}",
        "rollout.max_completion_tokens=12",
        roll_out=rolls_out(lambda _: (1.0, 0.0), lengths=(8, 12)),
        look=look,
    )
    assert plans[0].rewards == [[0.5, -1.0]] * 2
    assert metrics[0]["critic/score/mean"] == 0.5
    assert metrics[0]["critic/rewards/mean"] == -0.25


def test_truncated_answers_keep_their_reward_and_train_nothing(tmp_path: Path):
    plans, metrics = trained(
        tmp_path,
        "algorithm={shaping: {truncated: mask}}",
        roll_out=lambda lease, prompt_ids, version: TrajectoryGroup(
            lease.ordinal,
            0,
            prompt_ids,
            [
                *rolls_out(mixed, finish="length")(lease, prompt_ids, version).trajectories[:1],
                *rolls_out(mixed)(lease, prompt_ids, version).trajectories[1:],
            ],
        ),
    )
    assert plans[0].num_trained_tokens == [[0, 2]] * 2
    assert plans[0].rewards == [[1.0, 0.0]] * 2
    assert metrics[0]["batch/trained_tokens"] == 4.0
    assert metrics[0]["response_length/clip_ratio"] == 0.5


def test_remax_leases_one_more_request_that_is_a_baseline_and_nothing_else(tmp_path: Path):
    # Mutations caught: a seed too few; greedy tokens that train; metrics that count the greedy rollout, among them the
    # means of components.
    leases: list[Lease] = []
    plans, metrics = trained(
        tmp_path, "algorithm=remax", roll_out=rolls_out(lambda _: (1.0, 0.0, 0.75), leases, lengths=(2, 2, 5))
    )
    assert {(len(lease.seeds), lease.num_greedy) for lease in leases} == {(3, 1)}
    assert all(len(set(lease.seeds)) == 3 for lease in leases)
    for plan in plans:
        assert plan.num_greedy == 1
        assert plan.rewards == [[1.0, 0.0, 0.75]] * 2
        assert plan.num_trained_tokens == [[2, 2, 0]] * 2
    assert metrics[0]["critic/score/mean"] == 0.5
    assert metrics[0]["critic/score/max"] == 1.0
    assert metrics[0]["critic/rewards/mean"] == metrics[0]["reward/exact_match/mean"] == 0.5
    assert metrics[0]["response_length/max"] == 2.0
    assert metrics[0]["batch/completion_tokens"] == 8.0
    assert metrics[0]["counts/trajectories_scored"] >= 6


def test_the_filter_and_the_count_of_equal_groups_read_the_sampled_rewards_alone(tmp_path: Path):
    # Mutation caught: the greedy reward, which differs, makes group 0 informative, and neither equal.
    def rewards(ordinal: int) -> Rewards:
        return (1.0, 1.0, 0.0) if ordinal == 0 else (1.0, 0.0, 0.0)

    filters = "algorithm={type: remax, filter: {keep: spread}}"
    plans, metrics = trained(tmp_path / "filtered", filters, roll_out=rolls_out(rewards))
    assert plans[0].ordinals == [1, 2]
    assert metrics[-1]["counts/groups_filtered"] == 1
    _, metrics = trained(tmp_path / "kept", "algorithm=remax", roll_out=rolls_out(rewards))
    assert metrics[0]["rollout/equal_reward_groups"] == 1.0


def test_a_group_whose_greedy_rollout_has_no_reward_is_replaced(tmp_path: Path):
    # Mutation caught: a baseline of NaN, and with it the gradient.
    plans, metrics = trained(
        tmp_path,
        "algorithm=remax",
        "max_staleness=0",
        roll_out=rolls_out(lambda ordinal: (1.0, 0.0, None if ordinal == 1 else 0.5)),
    )
    assert [plan.ordinals for plan in plans] == [[0, 2], [3, 4], [5, 6]]
    assert metrics[-1]["counts/groups_untrainable"] == 1


def test_a_greedy_reward_is_shaped_like_those_that_it_is_the_baseline_of(tmp_path: Path):
    # Mutation caught: rewards in [-1, 1] compared with a baseline in [0, 1].
    plans, _ = trained(
        tmp_path,
        "algorithm={type: remax, shaping: {rescale: {}}}",
        roll_out=rolls_out(lambda _: (1.0, 0.0, 0.75)),
    )
    assert plans[0].rewards == [[1.0, -1.0, 0.5]] * 2


def test_equal_rewards_are_noted_only_where_they_teach_nothing(tmp_path: Path):
    # Mutation: note it of every recipe that compares within groups -> of components that differ under equal sums, of a
    # KL in the reward, of cross entropy with the answers themselves.
    notes: dict[str, bool] = {}
    learning = ("{advantages: gdpo}", "{kl_reward: {}}", "{loss: {policy: cross_entropy}}")
    for recipe in ("grpo", "remax", "reinforce_pp", *learning):

        def look(run: Run, recipe: str = recipe) -> None:
            notes[recipe] = any("learns nothing" in note for note in run.coordinator.status.notes)

        trained(
            tmp_path / str(len(notes)),
            f"algorithm={recipe}",
            roll_out=rolls_out(lambda _: (1.0, 1.0, 0.0)),
            look=look,
        )
    assert [recipe for recipe, is_noted in notes.items() if is_noted] == ["grpo"]
    assert len(notes) == 6


def test_gdpo_gets_each_reward_by_its_label_in_the_order_of_the_config(tmp_path: Path):
    # Mutation caught: components of another order than the weights that the ranks multiply with.
    def roll_out(lease: Lease, prompt_ids: np.ndarray, version: int) -> TrajectoryGroup:
        group = make_group(lease.ordinal, prompt_ids, version=version, reward=0.5)
        for_each = [{"reward_len": -1.0, "exact_match": 1.0}, {"exact_match": 0.0, "exact_match/acc": 3.0}]
        made = [replace(t, reward_components=c) for t, c in zip(group.trajectories, for_each, strict=True)]
        return replace(group, trajectories=made)

    rewards = "[{name: exact_match, weight: 1.0}, {name: 'rewards.py:reward_len', weight: 0.5}]"
    plans, _ = trained(tmp_path, "algorithm={advantages: gdpo}", f"reward={rewards}", roll_out=roll_out)
    assert list(plans[0].components) == ["exact_match", "reward_len"]
    assert plans[0].components["exact_match"] == [[1.0, 0.0]] * 2
    assert plans[0].components["reward_len"] == [[-1.0, None]] * 2
    assert plans[0].num_greedy == 0
