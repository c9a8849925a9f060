"""A rank's share of one batch as flat columns: what the stages of a recipe read and write.

    rows of the shard:   mini-batch 0: microbatch [group, group] [group] ..., mini-batch 1: ...
    columns [N]:         the trained tokens of those groups' trajectories, in the same order

So a microbatch is a slice of every column, and its trajectories a slice of the R trajectories.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.correction import Correction
from asyncrl.algorithms.segments import Segments
from asyncrl.learner.packing import PackedMicrobatch, pack
from asyncrl.types import Plan, Shard, TrajectoryGroup


@dataclass(slots=True, frozen=True)
class Microbatch:
    """One forward-backward of this rank: whole groups."""

    groups: list[TrajectoryGroup]
    tokens: slice
    """Of the rank's N trained tokens."""
    trajectories: slice
    """Of the rank's R trajectories."""
    device: torch.device

    def pack(self) -> PackedMicrobatch:
        """As the models take it."""
        return pack(self.groups, self.device)


@dataclass(slots=True)
class Columns:
    """One value a trained token, [N] each. A stage fills what the next ones read; None until then."""

    rollout_logprobs: Tensor
    """Under the distribution that sampled the token. float32."""
    policy_versions: Tensor
    """The version that sampled it. int64."""
    positions: Tensor
    """Its place in its trajectory, untrained tokens counted. int64."""
    learner_logprobs: Tensor | None = None
    """Under the learner before the batch's first step; NaN where nothing has read them yet."""
    proximal_logprobs: Tensor | None = None
    """Under the policy that ratios compare with."""
    ref_logprobs: Tensor | None = None
    """Under the reference model."""
    entropy: Tensor | None = None
    """Of the learner's distribution before the batch's first step."""
    values: Tensor | None = None
    """The critic's, before the batch's first step."""
    kl: Tensor | None = None
    """The estimate of the KL from the reference that is subtracted from the rewards."""
    kl_coef: float = 0.0
    """What it is multiplied by. Of the whole batch."""
    advantages: Tensor | None = None
    returns: Tensor | None = None
    """The critic's targets."""

    def score(self, tokens: slice, logprobs: Tensor) -> None:
        """Log-probs of the first mini-batch, which nobody reads before it trains."""
        assert self.learner_logprobs is not None
        self.learner_logprobs[tokens] = logprobs


@dataclass(slots=True)
class BatchRewards:
    """What every rank knows of the whole batch, from its plan; one value a trajectory, [R of the batch]."""

    rewards: Tensor
    """float64, after shaping; NaN where a trajectory has none."""
    group_index: Tensor
    """int64 from 0."""
    num_trained_tokens: Tensor
    """int64"""
    components: Tensor
    """[C, R] float64: each of the rewards before weights, NaN where it does not apply; C is 0 unless they are read."""
    greedy_rewards: Tensor | None
    """float64: of the greedy rollout of the trajectory's prompt, where there is one."""


@dataclass(slots=True)
class Experience:
    """A batch on one rank."""

    index: int
    """Of the batch: the version that trains it."""
    batch: BatchRewards
    rows: Tensor
    """[R] int64: each of this rank's trajectories in the batch's order."""
    segments: Segments
    """Of this rank's N tokens and R trajectories."""
    columns: Columns
    minibatches: list[list[Microbatch]]
    """[mini-batch][microbatch]"""
    correction: Correction | None = None
    """Of the whole batch, where a token's fate depends on other trajectories; else each microbatch makes its own."""
    selected: Tensor | None = None
    """[N] bool: the tokens that losses like kl_cov choose once a mini-batch."""
    first_is_scored: bool = True
    """Whether the first mini-batch has its learner_logprobs before it trains."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the stages measured, the same on every rank."""

    @property
    def group_index(self) -> Tensor:
        """[R] int64: the group of each of this rank's trajectories."""
        return self.batch.group_index[self.rows]

    @property
    def places(self) -> Tensor:
        """[N] int64: each of this rank's tokens among all of the batch's, which are in the order of its trajectories
        however they are spread."""
        of_batch, own = self.batch.num_trained_tokens, self.segments.counts()
        first_of_row = (of_batch.cumsum(0) - of_batch)[self.rows] - (own.cumsum(0) - own)
        return torch.arange(len(self.segments.index), device=own.device) + self.segments.spread(first_of_row)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds what the block takes to the metric timing_s/<name>."""
        start_s = time.monotonic()
        yield
        if self.rows.is_cuda:
            torch.cuda.synchronize(self.rows.device)
        key = f"timing_s/{name}"
        self.metrics[key] = self.metrics.get(key, 0.0) + time.monotonic() - start_s

    def microbatches(self) -> Iterator[Microbatch]:
        """All of them, in the order of the columns."""
        for minibatch in self.minibatches:
            yield from minibatch

    def num_tokens_of(self, minibatch: int) -> int:
        """This rank's trained tokens of a mini-batch."""
        return sum(m.tokens.stop - m.tokens.start for m in self.minibatches[minibatch])

    def segments_of(self, microbatch: Microbatch) -> Segments:
        """Its tokens, and its trajectories counted from 0."""
        first, last = microbatch.trajectories.start, microbatch.trajectories.stop
        return Segments(self.segments.index[microbatch.tokens] - first, last - first)


def receive_shard(shard: Shard, device: torch.device) -> Experience:
    """The shard as columns on `device`."""
    plan = shard.plan
    sizes = [len(rewards) for rewards in plan.rewards]
    first_row = np.concatenate([[0], np.cumsum(sizes)])
    positions = plan.positions_of(shard.rank)
    rows = [np.arange(first_row[p], first_row[p + 1]) for p in positions]
    trajectories = [t for group in shard.groups for t in group.trajectories]
    trained = [np.flatnonzero(t.loss_mask) for t in trajectories]
    columns = Columns(
        rollout_logprobs=_column(
            [t.rollout_logprobs[i] for t, i in zip(trajectories, trained, strict=True)], torch.float32, device
        ),
        policy_versions=_column(
            [t.policy_versions[i] for t, i in zip(trajectories, trained, strict=True)], torch.int64, device
        ),
        positions=_column(trained, torch.int64, device),
    )
    batch = _batch_rewards(plan, sizes, device)
    segments = Segments.of_counts(torch.tensor([len(i) for i in trained], dtype=torch.int64, device=device))
    return Experience(
        plan.index,
        batch,
        _column(rows, torch.int64, device),
        segments,
        columns,
        _cut(shard, device),
    )


def _batch_rewards(plan: Plan, sizes: list[int], device: torch.device) -> BatchRewards:
    rewards = _flat(plan.rewards, device)
    index = torch.arange(len(sizes), device=device)
    group_index = index.repeat_interleave(torch.tensor(sizes, dtype=torch.int64, device=device))
    greedy_rewards = None
    if plan.num_greedy:
        ends = torch.tensor(sizes, dtype=torch.int64, device=device).cumsum(0)
        greedy_rewards = rewards[ends - 1][group_index]
        for back in range(1, plan.num_greedy + 1):  # baselines, and no trajectories to compare with
            rewards[ends - back] = torch.nan
    counts = [count for group in plan.num_trained_tokens for count in group]
    components = [_flat(values, device) for values in plan.components.values()]
    return BatchRewards(
        rewards=rewards,
        group_index=group_index,
        num_trained_tokens=torch.tensor(counts, dtype=torch.int64, device=device),
        components=torch.stack(components) if components else rewards.new_empty(0, len(rewards)),
        greedy_rewards=greedy_rewards,
    )


def _flat(values: list[list[float | None]], device: torch.device) -> Tensor:
    """[group][trajectory] -> [R] float64, NaN for None."""
    flat = [float("nan") if value is None else value for group in values for value in group]
    return torch.tensor(flat, dtype=torch.float64, device=device)


def _cut(shard: Shard, device: torch.device) -> list[list[Microbatch]]:
    groups = iter(shard.groups)
    first_token = first_trajectory = 0
    minibatches: list[list[Microbatch]] = []
    for minibatch in shard.plan.minibatches:
        minibatches.append([])
        for positions in minibatch[shard.rank]:
            of_microbatch = [next(groups) for _ in positions]
            last_token = first_token + sum(group.num_trained_tokens for group in of_microbatch)
            last_trajectory = first_trajectory + sum(len(group.trajectories) for group in of_microbatch)
            minibatches[-1].append(
                Microbatch(
                    of_microbatch,
                    slice(first_token, last_token),
                    slice(first_trajectory, last_trajectory),
                    device,
                )
            )
            first_token, first_trajectory = last_token, last_trajectory
    return minibatches


def _column(pieces: Sequence[np.ndarray], dtype: torch.dtype, device: torch.device) -> Tensor:
    whole = np.concatenate(pieces) if pieces else np.empty(0)
    return torch.from_numpy(whole).to(device=device, dtype=dtype)
