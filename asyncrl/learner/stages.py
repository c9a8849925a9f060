"""The stages that a learner rank runs once a batch, before its first step: each fills columns of the experience.

A stage is `f(experience, learner)`. The recipe (config/recipes.py) names them in order; one of your own is
`module:attr` there. Every rank calls the same stages in the same order: a stage may issue collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from asyncrl.algorithms.advantages import Moments, token_rewards
from asyncrl.algorithms.advantages.estimators import (
    critic_advantages,
    summed_component_advantages,
    token_advantages,
    token_baseline_advantages,
    trajectory_advantages,
    whitened,
)
from asyncrl.algorithms.correction import Policies, correct, log_linear_proximal
from asyncrl.algorithms.losses.kl import kl_estimate
from asyncrl.algorithms.losses.kl_controller import KlController
from asyncrl.algorithms.user_functions import call_user_function, token_values
from asyncrl.config.advantages import (
    ComponentAdvantages,
    CustomAdvantages,
    GaeAdvantages,
    OutcomeAdvantages,
    PassAtKAdvantages,
    TokenBaselineAdvantages,
)
from asyncrl.config.algorithm import AlgorithmConfig, KlRewardConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.experience import Experience, Microbatch
from asyncrl.user_code import import_function, names_user_code


class Models(Protocol):
    """The models of a rank, as stages use them: no gradients, collective."""

    def score(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies) of the learner, [N of the microbatch]."""
        ...

    def sum_pi_squared(self, microbatch: Microbatch) -> Tensor:
        """Of the probabilities of the learner's distribution at each token."""
        ...

    def reference_logprobs(self, microbatch: Microbatch) -> Tensor: ...

    def values(self, microbatch: Microbatch) -> Tensor: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks."""
        ...

    def gather_columns(self, mine: Tensor, places: Tensor, num_tokens: int) -> Tensor:
        """mine [C, N], of all ranks' `num_tokens` tokens those at `places` [N] -> [C, num_tokens]."""
        ...


@dataclass(slots=True)
class StageContext:
    """What a stage may use besides the experience."""

    config: AlgorithmConfig
    models: Models
    kl_controller: KlController | None
    reward_weights: list[float]
    """Of each configured reward."""


Stage = Callable[[Experience, StageContext], None]


def score(experience: Experience, context: StageContext) -> None:
    """proximal_logprobs, entropy: of the learner before the first step.

    With `proximal: bypass` the rollout's log-probs take their place; with `log_linear` the loss makes them. A first
    mini-batch that no stage reads before it trains needs no pass: it is scored as it trains.
    """
    columns, correction = experience.columns, context.config.correction
    if correction.proximal == "bypass":
        columns.proximal_logprobs = columns.rollout_logprobs
    early = is_read_early(context.config)
    if correction.proximal != "recompute" and not early:
        return
    logprobs, entropy = (torch.full_like(columns.rollout_logprobs, torch.nan) for _ in range(2))
    if minibatches := experience.minibatches[0 if early else 1 :]:
        with experience.timed("old_log_prob"):
            for microbatch in chain.from_iterable(minibatches):
                logprobs[microbatch.tokens], entropy[microbatch.tokens] = context.models.score(microbatch)
    columns.learner_logprobs, columns.entropy = logprobs, entropy
    if correction.proximal == "recompute":
        columns.proximal_logprobs = logprobs
    elif correction.proximal == "log_linear":  # of the batch's start, for what looks at the whole batch
        columns.proximal_logprobs = log_linear_proximal(
            logprobs, columns.rollout_logprobs, columns.policy_versions, proximal_version=experience.index
        )
    experience.first_is_scored = early


def is_read_early(config: AlgorithmConfig) -> bool:
    """Whether a stage, or the choice of tokens of a mini-batch, reads the learner's log-probs before the first step."""
    return (
        config.kl_reward is not None
        or isinstance(config.advantages, TokenBaselineAdvantages | CustomAdvantages)
        or config.correction.needs_whole_batch
        or config.loss.selects_tokens
        or any(names_user_code(stage) for stage in config.stages)
    )


def reference(experience: Experience, context: StageContext) -> None:
    """ref_logprobs, where a KL term reads them."""
    if context.config.needs_reference:
        with experience.timed("ref"):
            experience.columns.ref_logprobs = fill(experience, context.models.reference_logprobs)


def values(experience: Experience, context: StageContext) -> None:
    """values of the critic, where there is one, before its first step."""
    if context.config.critic is None:
        return
    with experience.timed("values"):
        experience.columns.values = fill(experience, context.models.values)


def kl_reward(experience: Experience, context: StageContext) -> None:
    """kl: what the advantages subtract from the rewards, times the coefficient of now, which then follows the KL."""
    config: KlRewardConfig | None = context.config.kl_reward
    columns, controller = experience.columns, context.kl_controller
    if config is None or controller is None:
        return
    assert columns.learner_logprobs is not None
    assert columns.ref_logprobs is not None
    columns.kl = kl_estimate(
        columns.learner_logprobs,
        columns.ref_logprobs,
        estimator=config.estimator,
        clamp_estimate=config.clamp_estimate,
    )
    columns.kl_coef = controller.coefficient
    segments = experience.segments
    has_tokens = (segments.counts() > 0).double()
    sums = torch.stack([segments.mean(columns.kl.double()).sum(), has_tokens.sum()])
    mean_kl, num_trajectories = context.models.all_reduce(sums).tolist()
    mean_kl /= max(num_trajectories, 1.0)
    experience.metrics["actor/reward_kl_penalty"] = mean_kl
    experience.metrics["actor/reward_kl_penalty_coeff"] = columns.kl_coef
    controller.update(mean_kl, int(num_trajectories))


def advantage(experience: Experience, context: StageContext) -> None:
    """advantages, and returns where each token has a reward of its own."""
    config, columns, segments = context.config.advantages, experience.columns, experience.segments
    if isinstance(config, GaeAdvantages):
        assert columns.values is not None
        columns.advantages, columns.returns = critic_advantages(
            config,
            rewards_of_tokens(experience, context),
            columns.values,
            segments,
            positions=columns.positions,
        )
    elif isinstance(config, TokenBaselineAdvantages):
        assert columns.learner_logprobs is not None
        columns.advantages, columns.returns = token_baseline_advantages(
            config,
            rewards_of_tokens(experience, context),
            columns.learner_logprobs,
            fill(experience, context.models.sum_pi_squared),
            segments,
            experience.group_index,
            positions=columns.positions,
        )
    elif isinstance(config, CustomAdvantages):
        columns.advantages = own_advantages(config, experience)
    elif isinstance(config, ComponentAdvantages):
        batch = experience.batch
        whole = summed_component_advantages(
            config, batch.components, batch.group_index, weights=context.reward_weights
        )
        columns.advantages = segments.spread(whole[experience.rows].float())
    else:
        columns.advantages = advantages_of_outcome(config, experience, context)


def advantages_of_outcome(
    config: OutcomeAdvantages | PassAtKAdvantages, experience: Experience, context: StageContext
) -> Tensor:
    """[N], from one reward a trajectory of the whole batch, and the KL where it is in the reward."""
    batch, columns = experience.batch, experience.columns
    rewards, kl = clipped(batch.rewards, context), columns.kl
    if isinstance(config, OutcomeAdvantages):
        if kl is not None and config.kl_credit == "trajectory":
            rewards, kl = rewards - penalties(experience, kl, context), None
        if config.scale == "mean":
            _check_not_negative(rewards)
    whole = trajectory_advantages(
        config,
        rewards,
        batch.group_index,
        lengths=batch.num_trained_tokens,
        greedy_rewards=None if batch.greedy_rewards is None else clipped(batch.greedy_rewards, context),
    )
    mine = whole[experience.rows].float()
    if isinstance(config, PassAtKAdvantages):
        return experience.segments.spread(mine)
    return token_advantages(
        config, mine, experience.segments, positions=columns.positions, kl=kl, kl_coef=columns.kl_coef
    )


def rewards_of_tokens(experience: Experience, context: StageContext) -> Tensor:
    """[N] float32: each trajectory's reward at its last token, less the KL of every token where it is in the reward."""
    columns = experience.columns
    mine = clipped(experience.batch.rewards, context)[experience.rows]
    mine = mine.nan_to_num()  # of the unscored, which have no token here
    return token_rewards(mine, experience.segments, kl=columns.kl, kl_coef=columns.kl_coef).float()


def clipped(rewards: Tensor, context: StageContext) -> Tensor:
    """Within +- kl_reward.clip_reward."""
    kl_reward = context.config.kl_reward
    if kl_reward is None or kl_reward.clip_reward is None:
        return rewards
    return rewards.clamp(-kl_reward.clip_reward, kl_reward.clip_reward)


def penalties(experience: Experience, kl: Tensor, context: StageContext) -> Tensor:
    """[R of the batch] float64: the coefficient times the sum of each trajectory's KL, the same on every rank."""
    summed = torch.zeros_like(experience.batch.rewards)
    summed[experience.rows] = experience.columns.kl_coef * experience.segments.sum(kl.double())
    return context.models.all_reduce(summed)


def _check_not_negative(rewards: Tensor) -> None:
    """Raises LearnerError, on every rank, for rewards whose mean may be negative, which turns the advantages' sign."""
    lowest = float(rewards.nan_to_num(torch.inf).min())
    if lowest < 0:
        raise LearnerError(
            f"algorithm.advantages.scale mean divides by the mean reward of a group, which a reward of {lowest:g} can "
            "make 0 or negative, and so turn good answers into bad ones; give rewards from 0 up (as "
            "algorithm.shaping.rescale can), or take another scale"
        )


def own_advantages(config: CustomAdvantages, experience: Experience) -> Tensor:
    """Of the user's own function, float32. Raises LearnerError for what is no advantage of each token."""
    key, like = "algorithm.advantages.function", experience.columns.rollout_logprobs
    given = call_user_function(key, config.function, experience, **config.options)
    should = f"give one value a trained token, {[*like.shape]}: experience.segments.spread makes it of one a trajectory"
    return token_values(key, config.function, given, like, should=should).detach().to(like)


def own_stage(spec: str) -> Stage:
    """The user's own function as a stage: what it leaves the next ones can read, or it raises LearnerError."""
    key = "algorithm.stages"
    import_function(spec, key)

    def stage(experience: Experience, context: StageContext) -> None:
        had_advantages = experience.columns.advantages is not None
        given = call_user_function(key, spec, experience, context)
        if given is not None:
            raise LearnerError(
                f"{key} {spec!r} returned a {type(given).__name__}, which goes nowhere; write into experience.columns, "
                "and return nothing"
            )
        _check_left(experience, key, spec, needs_advantages=had_advantages)

    return stage


def _check_left(experience: Experience, key: str, spec: str, *, needs_advantages: bool) -> None:
    """Raises LearnerError for a column that is not one value a token, advantages that are not finite, and a metric that
    is no number."""
    columns = experience.columns
    like = columns.rollout_logprobs
    for name in (field.name for field in fields(columns) if field.name not in ("advantages", "kl_coef")):
        values = getattr(columns, name)
        if values is not None and (not isinstance(values, Tensor) or values.shape != like.shape):
            found = [*values.shape] if isinstance(values, Tensor) else type(values).__name__
            raise LearnerError(
                f"{key} {spec!r} left {found} in columns.{name}; one value a token is {[*like.shape]}"
            )
    if needs_advantages or columns.advantages is not None:
        should = f"leave experience.columns.advantages with one value a trained token, {[*like.shape]}"
        token_values(key, spec, columns.advantages, like, should=should)
    for name, value in experience.metrics.items():
        if not isinstance(value, int | float):
            raise LearnerError(
                f"{key} {spec!r} left a {type(value).__name__} in metrics[{name!r}]; make it a number with float()"
            )


def whiten(experience: Experience, context: StageContext) -> None:
    """Advantages by the moments of all ranks' tokens, where the estimator asks for it."""
    columns, table = experience.columns, context.config.token_whitening
    assert columns.advantages is not None
    if table is not None:
        moments = Moments(context.models.all_reduce(Moments.of(columns.advantages).sums))
        columns.advantages = whitened(table, columns.advantages, moments)


def correct_batch(experience: Experience, context: StageContext) -> None:
    """correction of the whole batch, where weights or rejections look beyond a trajectory; else the loss makes it."""
    config, columns = context.config.correction, experience.columns
    if not config.needs_whole_batch:
        return
    assert columns.learner_logprobs is not None
    assert columns.proximal_logprobs is not None
    experience.correction = correct(
        Policies(columns.learner_logprobs, columns.proximal_logprobs, columns.rollout_logprobs),
        experience.segments,
        config,
        advantages=columns.advantages,
        all_reduce=context.models.all_reduce,
    )


def fill(experience: Experience, model: Callable[[Microbatch], Tensor]) -> Tensor:
    """[N]: what `model` gives for each microbatch."""
    column = torch.empty_like(experience.columns.rollout_logprobs)
    for microbatch in experience.microbatches():
        column[microbatch.tokens] = model(microbatch)
    return column
