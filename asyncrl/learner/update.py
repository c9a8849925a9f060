"""One policy version: the forward and backward passes of a batch, and its optimizer steps.

Every rank of the learner loop holds one PolicyLearner and calls its methods in the same order, from the main
thread: most of them issue collectives.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from asyncrl.algorithms.recipe import LossSums, TokenBatch
from asyncrl.algorithms.registry import build_recipe
from asyncrl.config import Config
from asyncrl.dtypes import publish_dtype
from asyncrl.errors import LearnerError
from asyncrl.learner.export import export_model
from asyncrl.learner.finite import first_non_finite, shard_norms
from asyncrl.learner.model import TensorShard, load_policy
from asyncrl.learner.optimizer import PolicyOptimizer
from asyncrl.learner.packing import pack
from asyncrl.types import Plan, Shard, TrajectoryGroup


class PolicyLearner:
    """The trained policy on one rank: FSDP2 shards, optimizer and recipe.

    The same inputs on the same number of ranks and threads give bitwise the same weights on a CPU.
    """

    def __init__(self, model_path: Path, config: Config, *, mesh: DeviceMesh) -> None:
        """`model_path`: a folder in Hugging Face format. `mesh`: one-dimensional over all ranks, on cpu (gloo)
        or cuda (nccl): `init_device_mesh("cpu", (num_ranks,))` after init_process_group."""
        self._model_path = model_path
        self._mesh = mesh
        self._group = mesh.get_group()
        self._device = torch.device(mesh.device_type)
        self._publish_dtype: torch.dtype = getattr(torch, publish_dtype(config, mesh.device_type))
        self._recipe = build_recipe(config.algorithm)
        self._policy = load_policy(
            model_path, config.learner, temperature=config.rollout.temperature, mesh=mesh
        )
        self._optimizer = PolicyOptimizer(dict(self._policy.named_parameters()), config.learner, self._group)

    def update(self, shard: Shard) -> dict[str, float]:
        """Trains batch `shard.plan.index`: in every epoch one optimizer step a mini-batch, over all ranks.

        Advantages and proximal log-probs are those of the batch's start, in every step. Returns metrics that
        are already reduced over ranks: means over the tokens of all steps, the gradient norm over the steps.
        Raises LearnerError, without a step, on every rank when the ranks hold different plans, and on this rank
        alone when the shard is not this rank's share of its plan; on every rank, after the steps before it,
        when the gradient of a step is not finite.
        """
        plan = shard.plan
        self._check_shard(shard)
        self.agree_on(plan)
        minibatches = self._minibatches(shard)
        metrics = self._record_proximal_logprobs(minibatches[1:])
        totals, grad_norms = _Totals(), []
        for _ in range(plan.num_epochs):
            for number, microbatches in enumerate(minibatches):
                num_trained_tokens = plan.num_trained_tokens_of(number)
                for microbatch in microbatches:
                    totals.add(self._backward(microbatch, num_trained_tokens))
                grad_norm, metrics["actor/lr"] = self._optimizer.step(plan.index, len(grad_norms) + 1)
                grad_norms.append(grad_norm)
        metrics["actor/grad_norm"] = fmean(grad_norms)
        return metrics | totals.reduce(self._group, self._device, plan.num_epochs * plan.total_trained_tokens)

    def agree_on(self, plan: Plan) -> None:
        """Raises LearnerError on every rank when the ranks hold different plans. `update` calls it first: ranks
        that entered FSDP's collectives with different batches would hang or mix them. Collective."""
        mine = torch.tensor([plan.index, plan.digest], device=self._device)
        bounds = torch.cat([mine, -mine])
        dist.all_reduce(bounds, dist.ReduceOp.MIN, group=self._group)
        lowest, highest = bounds[:2].tolist(), (-bounds[2:]).tolist()
        if lowest != highest:
            raise LearnerError(
                f"the ranks hold different plans: batch {lowest[0]} and {highest[0]}, digest {lowest[1]:016x} "
                f"and {highest[1]:016x}; this rank has batch {plan.index}, digest {plan.digest:016x}; "
                "this is a fault of the coordinator: restart the run"
            )

    def check_finite(self) -> None:
        """Raises LearnerError on every rank when a weight is NaN or Inf, naming the first such tensor. Collective."""
        shards = list(self.named_shards())
        norms = shard_norms([shard.rows for shard in shards])
        if (index := first_non_finite(norms, self._group)) is not None:
            raise LearnerError(
                f"weights of {shards[index].name} are not finite; this version is not published; "
                "lower learner.lr or raise learner.warmup_versions"
            )

    def named_shards(self) -> Iterator[TensorShard]:
        """This rank's rows of every tensor, in the order of Hugging Face's state dict, a tied one once."""
        return self._policy.named_shards()

    def export(self, folder: Path) -> None:
        """Rank 0 writes the model to `folder`, which must not exist, in Hugging Face format. Collective."""
        is_writer = self._mesh.get_rank() == 0
        export_model(
            self._policy.transformer, self._model_path, folder, dtype=self._publish_dtype, is_writer=is_writer
        )

    def _check_shard(self, shard: Shard) -> None:
        plan, rank = shard.plan, self._mesh.get_local_rank()
        expected = [plan.ordinals[position] for position in plan.positions_of(rank)]
        ordinals = [group.ordinal for group in shard.groups]
        if shard.rank != rank or ordinals != expected:
            raise LearnerError(
                f"rank {rank} got a shard of rank {shard.rank} with groups {ordinals}, but the plan of batch "
                f"{plan.index} gives it {expected}; this is a fault of the coordinator: restart the run"
            )
        for number in range(len(plan.minibatches)):
            if plan.num_trained_tokens_of(number) == 0:
                raise LearnerError(
                    f"mini-batch {number} of batch {plan.index} has no trained token; a step needs at least one"
                )

    def _minibatches(self, shard: Shard) -> list[list[_Microbatch]]:
        """[mini-batch][microbatch] of this rank."""
        plan, advantages = shard.plan, self._advantages(shard.plan)
        groups = dict(zip(plan.positions_of(shard.rank), shard.groups, strict=True))
        return [
            [
                _Microbatch([groups[p] for p in positions], [advantages[p] for p in positions])
                for positions in minibatch[shard.rank]
            ]
            for minibatch in plan.minibatches
        ]

    def _advantages(self, plan: Plan) -> list[list[float]]:
        """[group][trajectory], from the rewards of the whole batch."""
        sizes = [len(rewards) for rewards in plan.rewards]
        flat = [float("nan") if reward is None else reward for group in plan.rewards for reward in group]
        group_index = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        advantages = self._recipe.advantages(torch.tensor(flat, dtype=torch.float64), group_index)
        return [group.tolist() for group in advantages.split(sizes)]

    def _record_proximal_logprobs(self, minibatches: list[list[_Microbatch]]) -> dict[str, float]:
        """A forward pass over the mini-batches after the first, before any step. Returns its time, if there is any.

        Without gradients, so ranks only gather weights, equally often. The first mini-batch needs no pass of its
        own: it is scored as it trains, before the first step (see `_backward`).
        """
        if not minibatches:
            return {}
        start_s = time.monotonic()
        with torch.no_grad():
            for microbatch in chain.from_iterable(minibatches):
                batch = pack(microbatch.groups, microbatch.advantages, self._device)
                microbatch.proximal_logprobs, _ = self._policy(batch)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return {"timing_s/old_log_prob": time.monotonic() - start_s}

    def _backward(self, microbatch: _Microbatch, num_trained_tokens: int) -> LossSums:
        """Adds one microbatch's share of the gradient of the token mean over its mini-batch."""
        batch = pack(microbatch.groups, microbatch.advantages, self._device)
        logprobs, entropy = self._policy(batch)
        proximal_logprobs = microbatch.proximal_logprobs
        if proximal_logprobs is None:
            proximal_logprobs = microbatch.proximal_logprobs = logprobs.detach()
        sums = self._recipe.loss(
            TokenBatch(
                learner_logprobs=logprobs,
                proximal_logprobs=proximal_logprobs,
                rollout_logprobs=batch.rollout_logprobs,
                advantages=batch.advantages,
                entropy=entropy,
            )
        )
        # FSDP averages gradients over the ranks; the token mean needs their sum.
        (sums.loss * (self._mesh.size() / num_trained_tokens)).backward()
        return sums


@dataclass(slots=True)
class _Microbatch:
    """One forward-backward of this rank, the same in every epoch."""

    groups: list[TrajectoryGroup]
    advantages: list[list[float]]
    """[group][trajectory]"""
    proximal_logprobs: Tensor | None = None
    """[N] of its trained tokens, before the batch's first step. None until they are known: a microbatch of the
    first mini-batch, before it trains."""


class _Totals:
    """Metric sums and maxima of this rank's microbatches, over all steps."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, losses: LossSums) -> None:
        for name, value in losses.sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.double()
        for name, value in losses.maxima.items():
            self._maxima[name] = value.maximum(self._maxima.get(name, value))

    def reduce(
        self, group: dist.ProcessGroup, device: torch.device, num_trained_tokens: int
    ) -> dict[str, float]:
        """Sums over ranks, for each token that trained in each epoch, and maxima over ranks. Collective."""
        sums = torch.stack(list(self._sums.values()))
        maxima = torch.stack(list(self._maxima.values()))
        dist.all_reduce(sums, group=group)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        means = (sums / num_trained_tokens).tolist()
        return dict(zip(self._sums, means, strict=True)) | dict(
            zip(self._maxima, maxima.tolist(), strict=True)
        )
