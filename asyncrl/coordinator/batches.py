"""From finished groups to a batch: what still trains, the plan for every rank, and the batch's metrics.

All pure functions of the groups. The learner turns a shard into tensors (learner/packing.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

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
    """A group as it trains in one batch, and how many tokens age took out of the loss."""

    group: TrajectoryGroup
    num_masked_tokens: int


def mask_group(
    group: TrajectoryGroup, *, batch_index: int, max_staleness: int, over_age: OverAge
) -> MaskedGroup:
    """Takes tokens out of the loss: those older than S (under `mask`), and all of unscored trajectories.

    Rewards and lengths keep the whole trajectory. The arrays of `group` are not written to.
    """
    oldest = oldest_trained_version(batch_index=batch_index, max_staleness=max_staleness, over_age=over_age)
    trajectories: list[Trajectory] = []
    num_masked = 0
    for trajectory in group.trajectories:
        loss_mask = trajectory.loss_mask
        if trajectory.status is not Status.SCORED:
            loss_mask = np.zeros_like(loss_mask)
        else:
            too_old = trajectory.policy_versions < oldest
            num_masked += int(loss_mask[too_old].sum())
            loss_mask = np.where(too_old, np.uint8(0), loss_mask)
        trajectories.append(replace(trajectory, loss_mask=loss_mask))
    return MaskedGroup(replace(group, trajectories=trajectories), num_masked)


def plan_batch(
    index: int,
    groups: list[TrajectoryGroup],
    *,
    num_ranks: int,
    max_tokens: int,
    num_minibatches: int = 1,
    num_epochs: int = 1,
) -> Plan:
    """Spreads groups (sorted by ordinal) over mini-batches, ranks and microbatches: a pure function of the batch.

    Groups are dealt to the mini-batches in turn, so their sizes differ by one at most, and none gets all of the
    lowest ordinals, which are the batch's oldest. Every epoch goes over the same mini-batches: ranks stay
    balanced in each, and a group stays on its rank, where its proximal log-probs are. Nothing is shuffled: the
    data order is.
    """
    num_tokens = [group.num_tokens for group in groups]
    return Plan(
        index=index,
        ordinals=[group.ordinal for group in groups],
        rewards=[[t.reward for t in group.trajectories] for group in groups],
        num_trained_tokens=[[int(t.loss_mask.sum()) for t in group.trajectories] for group in groups],
        minibatches=[
            _spread(range(first, len(groups), num_minibatches), num_tokens, num_ranks, max_tokens)
            for first in range(num_minibatches)
        ],
        num_epochs=num_epochs,
    )


def _spread(
    positions: Sequence[int], num_tokens: list[int], num_ranks: int, max_tokens: int
) -> list[list[list[int]]]:
    """[rank][microbatch] -> positions, of one mini-batch.

    Groups go to the least loaded rank, longest first (by packed tokens, ties by ordinal and rank); a rank
    fills its microbatches up to `max_tokens` in order of ordinal; every rank gets equally many microbatches,
    the missing ones empty (weight 0). A group over `max_tokens` is a microbatch of its own.
    """
    loads = [0] * num_ranks
    owned: list[list[int]] = [[] for _ in range(num_ranks)]
    for position in sorted(positions, key=lambda p: (-num_tokens[p], p)):
        rank = loads.index(min(loads))
        loads[rank] += num_tokens[position]
        owned[rank].append(position)
    microbatches = [_fill(sorted(of_rank), num_tokens, max_tokens) for of_rank in owned]
    most = max(len(of_rank) for of_rank in microbatches)
    for of_rank in microbatches:
        of_rank.extend([] for _ in range(most - len(of_rank)))
    return microbatches


def _fill(positions: list[int], num_tokens: list[int], max_tokens: int) -> list[list[int]]:
    microbatches: list[list[int]] = []
    room = 0
    for position in positions:
        if not microbatches or num_tokens[position] > room:
            microbatches.append([])
            room = max_tokens
        microbatches[-1].append(position)
        room -= num_tokens[position]
    return microbatches


def batch_metrics(plan: Plan, masked: list[MaskedGroup]) -> dict[str, float]:
    """What a batch's trajectories say, under verl's names where it has one.

    Rewards are over scored trajectories, staleness over trained tokens (weighted by token), lengths over all.
    """
    trajectories = [t for m in masked for t in m.group.trajectories]
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
        "critic/rewards/mean": float(rewards.mean()),
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
        "rollout/equal_reward_groups": float(sum(_equal_rewards(rewards) for rewards in plan.rewards)),
        "batch/trained_tokens": float(ages.size),
        "batch/completion_tokens": float(lengths.sum()),
        **component_means(scored),
    }


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
