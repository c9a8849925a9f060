"""The supervised tokens of each optimizer step, beside its trajectories: PPO-ptx of InstructGPT, arXiv:2203.02155 (2).

Every rank reads `data.supervised` for itself. Which rows a step takes, and which rank has which of them in which
microbatch, is a pure function of (seed, version, step): nothing is communicated, the loss depends neither on ranks nor
on the token budget, and a run that is resumed goes on where it was.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count
from math import ceil

import numpy as np
import torch
import torch.distributed as dist

from asyncrl.algorithms.losses.objective import ptx_term
from asyncrl.config import Config
from asyncrl.envs.order import DataOrder
from asyncrl.envs.supervised import SupervisedDataset, supervised_seed
from asyncrl.errors import LearnerError
from asyncrl.learner.model import PolicyModel
from asyncrl.learner.packing import pack
from asyncrl.learner.totals import Totals
from asyncrl.types import Plan, Status, Trajectory, TrajectoryGroup


class SupervisedSteps:
    """What each step of the policy trains besides its trajectories, on one rank."""

    def __init__(
        self, config: Config, dataset: SupervisedDataset, device: torch.device, *, rank: int, num_ranks: int
    ) -> None:
        """`rank`, `num_ranks`: of those that split the data."""
        self._ptx = config.algorithm.loss.ptx
        self._max_tokens = config.learner.max_tokens_per_microbatch
        self._dataset = dataset
        self._order = DataOrder(
            supervised_seed(config), dataset.sizes, [source.weight for source in config.data.supervised]
        )
        self._device = device
        self._rank = rank
        self._num_ranks = num_ranks

    def rows_of(self, plan: Plan, step: int) -> list[int]:
        """The rows that step `step` of the plan's version takes, over all ranks: each once an epoch of the order."""
        num_steps = len(plan.minibatches) * plan.num_epochs
        first = (plan.index * num_steps + step) * self._ptx.rows_per_minibatch
        return [self._order.place(first + i)[1] for i in range(self._ptx.rows_per_minibatch)]

    def num_tokens(self, plan: Plan, num_steps: int) -> int:
        """That the version's first so many steps train, over all ranks."""
        return sum(self._num_tokens_of(self.rows_of(plan, step)) for step in range(num_steps))

    def backward(self, policy: PolicyModel, plan: Plan, step: int, totals: Totals, *, scale: float) -> None:
        """Adds coef * the mean of -log pi over the tokens of the step's completions to its loss and gradient.

        It is the likelihood of the data: the model's own distribution is scored, at temperature 1 whatever that of the
        rollouts is. `scale`: what the step's loss and gradient are multiplied by afterwards. Collective.
        """
        rows = self.rows_of(plan, step)
        num_tokens = self._num_tokens_of(rows)
        lengths = [int(self._dataset.starts[row + 1] - self._dataset.starts[row]) for row in rows]
        for microbatch in spread_rows(lengths, self._num_ranks, self._max_tokens)[self._rank]:
            groups = [self._group(rows[i]) for i in microbatch]
            logprobs = policy(pack(groups, self._device), temperature=1.0).logprobs
            loss = ptx_term(self._ptx, logprobs, num_tokens) / scale
            totals.add_share("actor/ptx_loss", loss)
            # FSDP averages gradients over the ranks; the loss is the sum of their shares.
            (loss * self._num_ranks).backward()

    def _num_tokens_of(self, rows: Sequence[int]) -> int:
        return int(self._dataset.completion_lengths[rows].sum())

    def _group(self, row: int) -> TrajectoryGroup:
        """As packing takes it: a prompt and a completion, all of which trains. Nobody sampled it."""
        found = self._dataset[row]
        length = len(found.completion_ids)
        completion = Trajectory(
            token_ids=found.completion_ids,
            loss_mask=np.ones(length, np.uint8),
            rollout_logprobs=np.full(length, np.nan, np.float32),
            policy_versions=np.full(length, -1, np.int32),
            reward=None,
            status=Status.SCORED,
            finish_reason="stop",
        )
        return TrajectoryGroup(ordinal=row, redraw=0, prompt_ids=found.prompt_ids, trajectories=[completion])


def spread_rows(lengths: Sequence[int], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """[rank][microbatch] -> indices of rows, equally many microbatches a rank, some of which may be empty.

    The fewest microbatches of at most `max_tokens` tokens, a row that exceeds them alone; rows go longest first to the
    lightest, so the ranks have about equal work.
    """
    fewest = max(1, ceil(sum(lengths) / max_tokens / num_ranks))
    for num_microbatches in count(fewest * num_ranks, num_ranks):
        parts: list[list[int]] = [[] for _ in range(num_microbatches)]
        loads = [(0, part) for part in range(num_microbatches)]
        for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
            load, part = heapq.heappop(loads)
            parts[part].append(row)
            heapq.heappush(loads, (load + lengths[row], part))
        if all(load <= max_tokens or len(parts[part]) == 1 for load, part in loads):
            return [parts[rank::num_ranks] for rank in range(num_ranks)]
    raise AssertionError("as many microbatches as rows hold them")


def agree_on_rows(dataset: SupervisedDataset, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises LearnerError on every rank when the ranks have read different rows: their steps would not fit each other.
    Collective."""
    mine = dataset.digest
    bounds = torch.tensor([mine, -mine], device=device)
    dist.all_reduce(bounds, dist.ReduceOp.MIN, group=group)
    lowest, highest = int(bounds[0]), -int(bounds[1])
    if lowest != highest:
        raise LearnerError(
            f"the ranks read different rows from data.supervised: digests {lowest:016x} and {highest:016x}, this rank "
            f"{mine:016x} of {len(dataset)} rows; its files must be the same everywhere, and a generator must give the "
            "same rows for the same seed"
        )
