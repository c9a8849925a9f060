"""The optimizer steps of a batch: in every epoch one a mini-batch, of the policy and of a critic."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor

from asyncrl.algorithms.losses import Counts, denominator
from asyncrl.algorithms.losses.values import ValueSums, critic_objective, explained_variance, value_sums
from asyncrl.config import Config
from asyncrl.config.algorithm import CriticConfig
from asyncrl.config.losses import AggregationConfig, ValueLossConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.experience import Experience, Microbatch
from asyncrl.learner.loss import policy_loss, scales_afterwards
from asyncrl.learner.optimizer import ShardedOptimizer
from asyncrl.learner.ptx import SupervisedSteps
from asyncrl.learner.rank_models import RankModels
from asyncrl.learner.totals import Totals
from asyncrl.types import Plan

NONE = Counts(0.0, 0.0, 0.0, 0.0)
EARLY_STOP_FACTOR = 1.5
"""No further step once the KL exceeds so many times target_kl: spinningup's PPO."""


class PolicySteps:
    """Steps of the policy. The same inputs on as many ranks and threads give the same bits on a CPU."""

    def __init__(self, config: Config, models: RankModels, supervised: SupervisedSteps | None = None) -> None:
        self._config = config
        self._models = models
        self._supervised = supervised
        self.optimizer = ShardedOptimizer(
            {name: p for name, p in models.policy.named_parameters() if p.requires_grad},
            config.learner,
            models.mesh,
        )

    def take(self, experience: Experience, plan: Plan, totals: Totals) -> dict[str, float]:
        """Raises LearnerError on every rank when a step's gradient is not finite; the steps before it were taken."""
        norms: list[float] = []
        metrics: dict[str, float] = {}
        for _ in range(plan.num_epochs):
            for number in range(len(plan.minibatches)):
                scale = self._backward(experience, plan, number, totals, step_number=len(norms))
                if scale is None:
                    self.optimizer.drop_gradients()
                    metrics |= self._supervised_tokens(plan, num_steps=len(norms))
                    return metrics | {"actor/grad_norm": fmean(norms or [0.0]), "actor/early_stopped": 1.0}
                norm, metrics["actor/lr"] = self.optimizer.step(plan.index, len(norms) + 1, scale=scale)
                norms.append(norm)
        if self._config.algorithm.target_kl is not None:
            metrics["actor/early_stopped"] = 0.0
        metrics |= self._supervised_tokens(plan, num_steps=len(norms))
        return metrics | {"actor/grad_norm": fmean(norms)}

    def _supervised_tokens(self, plan: Plan, *, num_steps: int) -> dict[str, float]:
        if self._supervised is None:
            return {}
        return {"batch/supervised_tokens": float(self._supervised.num_tokens(plan, num_steps))}

    def _backward(
        self, experience: Experience, plan: Plan, number: int, totals: Totals, *, step_number: int
    ) -> float | None:
        """The gradient of a mini-batch, but for the factor that is returned; None where its KL is over the target.

        `step_number`: of the version's steps, from 0.
        """
        algorithm = self._config.algorithm
        counts, positive_tokens = counts_of(plan, number), positive_tokens_of(plan, number)
        counted, kl_sums = NONE, torch.zeros(2, dtype=torch.float64, device=experience.rows.device)
        for microbatch in experience.minibatches[number]:
            output = self._models.policy(microbatch.pack())
            if number == 0 and not experience.first_is_scored:
                experience.columns.score(microbatch.tokens, output.logprobs.detach())
            step = policy_loss(
                algorithm,
                experience,
                microbatch,
                output,
                counts,
                totals,
                max_staleness=self._config.max_staleness,
                positive_tokens=positive_tokens,
            )
            loss = step.loss
            if output.values is not None:
                loss = loss + self._shared_critic_loss(experience, microbatch, output.values, counts, totals)
            # FSDP averages gradients over the data ranks; the loss is the sum of their shares.
            (loss * self._models.num_data_ranks).backward()
            counted, kl_sums = counted + step.counted, kl_sums + step.kl_sums
        experience.first_is_scored |= number == 0
        scale = 1.0
        if scales_afterwards(algorithm):
            total = Counts(*self._models.all_reduce(counted.tensor(kl_sums.device)).tolist())
            scale = _one_over(replace(total, trajectories=counts.trajectories), algorithm.loss.aggregation)
        if self._supervised is not None:
            self._supervised.backward(self._models.policy, plan, step_number, totals, scale=scale)
        own_tokens = experience.num_tokens_of(number)
        totals.close_step(scale=scale, step_tokens=counts.tokens, own_tokens=own_tokens)
        if algorithm.target_kl is not None:
            kl, num_tokens = self._models.all_reduce(kl_sums).tolist()
            if kl > EARLY_STOP_FACTOR * algorithm.target_kl * num_tokens:
                return None
        return scale

    def _shared_critic_loss(
        self, experience: Experience, microbatch: Microbatch, values: Tensor, counts: Counts, totals: Totals
    ) -> Tensor:
        critic = self._config.algorithm.critic
        assert critic is not None
        return critic.coef * critic_loss(critic.loss, experience, microbatch, values, counts, totals)


def _one_over(counts: Counts, table: AggregationConfig) -> float:
    """Raises LearnerError, on every rank, for a count of 0 under `at_least: 0`."""
    divisor = denominator(counts, mode=table.mode, divide_by=table.divide_by, at_least=table.at_least)
    if not divisor:
        raise LearnerError(
            "algorithm.correction.rejections reject every token of a mini-batch, and loss.aggregation.at_least 0 "
            "divides by what is left; widen their bounds, or set loss.aggregation.at_least: 1, under "
            "which it gives no gradient"
        )
    return 1.0 / divisor


class CriticSteps:
    """Steps of a critic with a body of its own."""

    def __init__(self, config: Config, models: RankModels) -> None:
        assert config.algorithm.critic is not None
        self._config: CriticConfig = config.algorithm.critic
        self._models = models

    def take(self, experience: Experience, plan: Plan, totals: Totals) -> dict[str, float]:
        """As PolicySteps.take; every step compares with the values before the first."""
        critic = self._models.critic
        assert critic is not None
        norms, lr = [], 0.0
        for _ in range(self._config.epochs or plan.num_epochs):
            for number, microbatches in enumerate(experience.minibatches):
                counts = counts_of(plan, number)
                for microbatch in microbatches:
                    values = critic.model(microbatch.pack())
                    loss = critic_loss(self._config.loss, experience, microbatch, values, counts, totals)
                    (loss * self._models.num_data_ranks).backward()
                own_tokens = experience.num_tokens_of(number)
                totals.close_step(scale=1.0, step_tokens=counts.tokens, own_tokens=own_tokens)
                norm, lr = critic.optimizer.step(plan.index, len(norms) + 1)
                norms.append(norm)
        return {"critic/grad_norm": fmean(norms), "critic/lr": lr}


def critic_loss(
    config: ValueLossConfig,
    experience: Experience,
    microbatch: Microbatch,
    values: Tensor,
    counts: Counts,
    totals: Totals,
) -> Tensor:
    """The microbatch's share of its mini-batch's value loss, with gradient."""
    columns, part = experience.columns, microbatch.tokens
    assert columns.values is not None
    assert columns.returns is not None
    loss, diagnostics = critic_objective(
        config,
        values,
        columns.values[part],
        columns.returns[part],
        experience.segments_of(microbatch),
        counts=counts,
        group_index=experience.group_index[microbatch.trajectories],
    )
    totals.add_share("critic/vf_loss", loss)
    for name, of_token in diagnostics.items():
        totals.add_mean(f"critic/{name}", of_token)
    return loss


def value_metrics(experience: Experience, models: RankModels) -> dict[str, float]:
    """How well the critic's values before the first step explain the returns of the whole batch. Collective."""
    columns = experience.columns
    if columns.values is None or columns.returns is None:
        return {}
    sums = models.all_reduce(torch.stack(list(value_sums(columns.values, columns.returns))))
    num_tokens = float(sums[0].clamp(min=1))
    means = {
        "critic/returns/mean": float(sums[1]) / num_tokens,
        "critic/values/mean": float(sums[1] - sums[3]) / num_tokens,
    }
    if num_tokens < 2:  # no variance, and NaN is no JSON
        return means
    return means | {"critic/vf_explained_var": float(explained_variance(ValueSums(*sums), epsilon=1e-5))}


def positive_tokens_of(plan: Plan, minibatch: int) -> float:
    """Trained tokens of a mini-batch, over all ranks, of trajectories with a reward above 0."""
    return float(
        sum(
            count
            for p in plan.positions_in(minibatch)
            for count, reward in zip(plan.num_trained_tokens[p], plan.rewards[p], strict=True)
            if reward is not None and reward > 0
        )
    )


def counts_of(plan: Plan, minibatch: int) -> Counts:
    """Of a mini-batch, over all ranks. Greedy rollouts are no trajectories of it, nor are failed ones, which have no
    reward, and those that age left no token."""
    positions = plan.positions_in(minibatch)
    num_sampled = [len(plan.rewards[p]) - plan.num_greedy for p in positions]
    trained = [plan.num_trained_tokens[p][:n] for p, n in zip(positions, num_sampled, strict=True)]
    rewards = [plan.rewards[p][:n] for p, n in zip(positions, num_sampled, strict=True)]
    num_scored = sum(reward is not None for group in rewards for reward in group)
    num_aged_out = sum(plan.num_aged_out[p] for p in positions) if plan.num_aged_out else 0
    return Counts(
        tokens=float(sum(sum(group) for group in trained)),
        trajectories=float(num_scored - num_aged_out),
        trained_trajectories=float(sum(count > 0 for group in trained for count in group)),
        groups=float(sum(any(group) for group in trained)),
    )
