"""From finished groups to a batch: what still trains, the plan for every rank, and the batch's metrics.

All pure functions of the groups. The learner turns a shard into tensors (learner/packing.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from asyncrl.coordinator.balance import balance, group_cost, pack
from asyncrl.coordinator.staleness import FinishedGroup, OverAge, oldest_trained_version
from asyncrl.envs.reward_messages import is_vote
from asyncrl.types import Plan, Status, Trajectory, TrajectoryGroup


def describe_finished(group: TrajectoryGroup) -> FinishedGroup:
    """What the staleness rules need to know of a group. Trajectories without a reward never train."""
    newest = [
        int(t.policy_versions[t.loss_mask == 1].max())
        for t in group.trajectories
        if t.status is Status.SCORED and t.loss_mask.any()
    ]
    return FinishedGroup(group.ordinal, group.first_version, max(newest, default=None))


@dataclass(frozen=True, slots=True)
class MaskedGroup:
    """A group as it trains in one batch, and what age took out of the loss."""

    group: TrajectoryGroup
    num_masked_tokens: int
    num_aged_out: int
    """Trajectories of which no token is left."""


def mask_group(
    group: TrajectoryGroup, *, batch_index: int, max_staleness: int, over_age: OverAge
) -> MaskedGroup:
    """Takes tokens out of the loss: those older than S (under `mask`), and all of unscored trajectories.

    Rewards and lengths keep the whole trajectory. The arrays of `group` are not written to.
    """
    oldest = oldest_trained_version(batch_index=batch_index, max_staleness=max_staleness, over_age=over_age)
    trajectories: list[Trajectory] = []
    num_masked = num_aged_out = 0
    for trajectory in group.trajectories:
        loss_mask = trajectory.loss_mask
        if trajectory.status is not Status.SCORED:
            loss_mask = np.zeros_like(loss_mask)
        else:
            too_old = trajectory.policy_versions < oldest
            num_masked += int(loss_mask[too_old].sum())
            could_train = loss_mask.any()
            loss_mask = np.where(too_old, np.uint8(0), loss_mask)
            num_aged_out += bool(could_train and not loss_mask.any())
        trajectories.append(replace(trajectory, loss_mask=loss_mask))
    return MaskedGroup(replace(group, trajectories=trajectories), num_masked, num_aged_out)


def plan_batch(
    index: int,
    groups: list[TrajectoryGroup],
    *,
    num_ranks: int,
    max_tokens: int,
    num_minibatches: int = 1,
    num_epochs: int = 1,
    hidden_size: int = 1024,
    shuffle_seed: int | None = None,
    components: Sequence[str] = (),
    num_greedy: int = 0,
    num_aged_out: Sequence[int] = (),
) -> Plan:
    """Spreads groups (sorted by ordinal) over mini-batches, ranks and microbatches: a pure function of the batch.

    Groups are dealt to the mini-batches in turn, so their sizes differ by one at most, and none gets all of the
    lowest ordinals, which are the batch's oldest; with `shuffle_seed` they are dealt in a random order instead. Every
    epoch goes over the same mini-batches: ranks stay balanced in each, and a group stays on its rank, where its
    proximal log-probs are.

    `hidden_size`: of the model; it weighs the matrices against attention in a group's cost. `components`: labels of
    rewards that the ranks read one by one.
    """
    order = list(range(len(groups)))
    if shuffle_seed is not None:
        order = np.random.Generator(np.random.PCG64([shuffle_seed, index])).permutation(order).tolist()
    return Plan(
        index=index,
        ordinals=[group.ordinal for group in groups],
        rewards=[[t.trained_reward for t in group.trajectories] for group in groups],
        num_trained_tokens=[[int(t.loss_mask.sum()) for t in group.trajectories] for group in groups],
        minibatches=[
            _spread(order[first::num_minibatches], groups, num_ranks, max_tokens, hidden_size)
            for first in range(num_minibatches)
        ],
        num_epochs=num_epochs,
        components={
            label: [[t.reward_components.get(label) for t in group.trajectories] for group in groups]
            for label in components
        },
        num_greedy=num_greedy,
        num_aged_out=list(num_aged_out) or [0] * len(groups),
    )


def _spread(
    positions: Sequence[int], groups: list[TrajectoryGroup], num_ranks: int, max_tokens: int, hidden_size: int
) -> list[list[list[int]]]:
    """[rank][microbatch] -> positions, of one mini-batch.

    Ranks get equal work (balance.py); a rank's microbatches hold at most `max_tokens` packed tokens, but for a group
    that exceeds them alone, and are about equally full. Every rank has equally many, if need be empty ones (weight 0).
    """
    positions = sorted(positions)
    costs = [
        group_cost(
            len(groups[p].prompt_ids), [len(t) for t in groups[p].trajectories], linear=6.0 * hidden_size
        )
        for p in positions
    ]
    owned = [[positions[item] for item in part] for part in balance(costs, num_ranks)]

    def microbatches(rank: int, at_least: int) -> list[list[int]]:
        sizes = [float(groups[p].num_tokens) for p in owned[rank]]
        parts = pack(sizes, float(max_tokens), min_parts=min(at_least, len(sizes)))
        return [sorted(owned[rank][item] for item in part) for part in parts]

    most = max(1, *(len(microbatches(rank, 1)) for rank in range(num_ranks)))
    spread = [sorted(microbatches(rank, most)) for rank in range(num_ranks)]
    most = max(len(of_rank) for of_rank in spread)
    return [of_rank + [[]] * (most - len(of_rank)) for of_rank in spread]


def batch_metrics(plan: Plan, masked: list[MaskedGroup]) -> dict[str, float]:
    """What a batch's trajectories say, under verl's names where it has one.

    Rewards are over scored trajectories, staleness over trained tokens (weighted by token), lengths over all.
    """
    trajectories = [t for m in masked for t in _sampled(m.group, plan.num_greedy)]
    scored = [t for t in trajectories if t.status is Status.SCORED]
    rewards = np.array([t.reward for t in scored])
    lengths = np.array([len(t) for t in trajectories])
    ages = np.concatenate([plan.index - t.policy_versions[t.loss_mask == 1] for t in trajectories])
    num_masked = sum(m.num_masked_tokens for m in masked)
    rank_tokens = [
        sum(masked[p].group.num_tokens for p in plan.positions_of(rank)) for rank in range(plan.num_ranks)
    ]
    return {
        "critic/score/mean": float(rewards.mean()),
        "critic/score/max": float(rewards.max()),
        "critic/score/min": float(rewards.min()),
        "critic/rewards/mean": float(
            np.mean([t.trained_reward for t in scored if t.trained_reward is not None])
        ),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": sum(t.finish_reason == "length" for t in trajectories)
        / len(trajectories),
        "prompt_length/mean": float(np.mean([len(m.group.prompt_ids) for m in masked])),
        "global_seqlen/mean": float(np.mean(rank_tokens)),
        "global_seqlen/min": float(min(rank_tokens)),
        "global_seqlen/max": float(max(rank_tokens)),
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "staleness/masked_share": num_masked / (num_masked + ages.size),
        "rollout/failed": float(len(trajectories) - len(scored)),
        "rollout/equal_reward_groups": float(
            sum(
                _equal_rewards([t.trained_reward for t in _sampled(m.group, plan.num_greedy)]) for m in masked
            )
        ),
        "batch/trained_tokens": float(ages.size),
        "batch/completion_tokens": float(lengths.sum()),
        **component_means(scored),
    }


def _sampled(group: TrajectoryGroup, num_greedy: int) -> list[Trajectory]:
    """Without the greedy rollouts at the end."""
    return group.trajectories[: len(group.trajectories) - num_greedy]


def component_means(trajectories: list[Trajectory]) -> dict[str, float]:
    """`reward/<label>/mean` of each reward, before weights, over the trajectories that it applied to."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for label, value in trajectory.reward_components.items():
            if not is_vote(label):
                values.setdefault(label, []).append(value)
    return {f"reward/{label}/mean": float(np.mean(of_label)) for label, of_label in sorted(values.items())}


def _equal_rewards(rewards: list[float | None]) -> bool:
    scored = {reward for reward in rewards if reward is not None}
    return len(scored) <= 1
