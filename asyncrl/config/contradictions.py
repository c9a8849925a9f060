"""Combinations of the options of `algorithm` that cannot be meant: each says which key, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.config.advantages import (
    ComponentAdvantages,
    GaeAdvantages,
    OutcomeAdvantages,
    PassAtKAdvantages,
    TokenBaselineAdvantages,
)
from asyncrl.config.losses import (
    ClipCovLoss,
    DroLoss,
    GmpoLoss,
    KlCovLoss,
    PolicyLoss,
    RatioOptions,
    VespoLoss,
)
from asyncrl.config.shaping import ShapingConfig
from asyncrl.user_code import names_user_code

if TYPE_CHECKING:
    from asyncrl.config.algorithm import AlgorithmConfig


def contradictions(algorithm: AlgorithmConfig) -> Iterator[str]:
    """`key: what is wrong; what to do`, keys counted from `algorithm`."""
    yield from _of_the_critic(algorithm)
    yield from _of_stages(algorithm)
    yield from _of_the_filter(algorithm)
    yield from _of_the_advantages(algorithm)
    yield from _of_the_reference(algorithm)
    yield from _of_shaping(algorithm)
    yield from _of_the_correction(algorithm)
    yield from _of_the_loss(algorithm)


def _of_stages(algorithm: AlgorithmConfig) -> Iterator[str]:
    """What is asked for is done by a stage, which the recipe must have."""
    reads_ref = algorithm.loss.kl is not None and algorithm.loss.kl.reference == "ref"
    for key, is_asked, stage in (
        ("filter.keep", algorithm.filter.keep != "all", "filter"),
        ("shaping", algorithm.shaping != ShapingConfig(), "shape"),
        ("kl_reward", algorithm.kl_reward is not None, "kl_reward"),
        ("loss.kl", reads_ref, "reference"),
        ("advantages", isinstance(algorithm.advantages, GaeAdvantages), "values"),
        ("critic", algorithm.critic is not None, "critic"),
        ("advantages.whiten", algorithm.token_whitening is not None, "whiten"),
        ("loss", algorithm.loss.selects_tokens, "select"),
    ):
        if is_asked and stage not in algorithm.stages:
            where = "use the recipe ppo" if stage in ("values", "critic") else "add it"
            yield f"{key}: the stages of {algorithm.type!r} lack {stage!r}; {where}, or leave the key out"
    correction = algorithm.correction
    if (correction.weight is not None or correction.rejections) and "correct" not in algorithm.stages:
        yield (
            f"correction: the stages of {algorithm.type!r} lack 'correct'; add it, or set correction: {{weight: null}} "
            "without rejections"
        )


def _of_the_filter(algorithm: AlgorithmConfig) -> Iterator[str]:
    filters = algorithm.filter
    for key, readers in {
        "metric": ("mean_between", "spread"),
        "tolerance": ("spread",),
        "measure": ("spread",),
        "group_of_one": ("spread",),
        "between": ("mean_between",),
    }.items():
        if filters.keep not in readers and getattr(filters, key) != type(filters).model_fields[key].default:
            yield (
                f"filter.{key}: filter.keep {filters.keep} does not read it; set filter.keep: {readers[-1]}, or leave "
                "it out"
            )


def _of_the_advantages(algorithm: AlgorithmConfig) -> Iterator[str]:
    advantages = algorithm.advantages
    if not isinstance(advantages, OutcomeAdvantages | ComponentAdvantages):
        return
    if advantages.scale == "std" and advantages.epsilon_form != "where_positive":
        for key, value in _of_a_deviation_of_zero(advantages):
            yield (
                f"advantages.{key}: with {value} a deviation can be 0 where the reward differs from the baseline, and "
                "the advantage would be divided by epsilon alone; set advantages.epsilon_form: where_positive, or "
                "advantages.scale: none"
            )
    if isinstance(advantages, OutcomeAdvantages) and advantages.kl_credit == "own_token":
        for key, unread in (("gamma", advantages.gamma != 1), ("gaps", advantages.gaps == "cut")):
            if unread:
                yield (
                    f"advantages.{key}: {getattr(advantages, key)} moves credit from token to token, which "
                    "advantages.kl_credit own_token leaves where it is; leave one of them out"
                )


def _of_a_deviation_of_zero(
    advantages: OutcomeAdvantages | ComponentAdvantages,
) -> Iterator[tuple[str, str]]:
    """(key, value) that let the deviation vanish under a difference that does not."""
    if advantages.deviation == "leave_one_out":
        yield "deviation", "leave_one_out"
    if isinstance(advantages, OutcomeAdvantages):
        if advantages.baseline in ("none", "greedy"):
            yield "baseline", advantages.baseline
        elif (advantages.baseline_over, advantages.scale_over) == ("batch", "group"):
            yield "baseline_over", "batch and scale_over group"


def _of_the_critic(algorithm: AlgorithmConfig) -> Iterator[str]:
    advantages, critic = algorithm.advantages, algorithm.critic
    if critic is None:
        if isinstance(advantages, GaeAdvantages):
            yield (
                "advantages: gae reads the values of a critic; use the recipe ppo, or critic: {} with its stages, or "
                "other advantages"
            )
        return
    has_own_stage = any(names_user_code(stage) for stage in algorithm.stages)
    if not isinstance(advantages, GaeAdvantages | TokenBaselineAdvantages) and not has_own_stage:
        yield (
            f"critic: advantages of type {advantages.type} give a critic no returns to learn; use gae (the recipe "
            "ppo), or set critic: null"
        )
    if critic.shared:
        for key in ("model", "lr", "warmup_versions", "epochs"):
            if getattr(critic, key) != type(critic).model_fields[key].default:
                yield f"critic.{key}: a shared critic trains with the policy's loss; leave it out, or set shared: false"
        if algorithm.correction.rejections and algorithm.correction.denominator == "kept":
            yield (
                "critic.shared: its loss is divided by a count that is known before the correction, and that of "
                "correction.denominator kept only afterwards; set correction.denominator: all, or shared: false"
            )
    elif critic.coef != type(critic).model_fields["coef"].default:
        yield "critic.coef: a critic of its own is trained by an optimizer of its own; set critic.lr, or shared: true"


def _of_the_reference(algorithm: AlgorithmConfig) -> Iterator[str]:
    advantages, kl_reward = algorithm.advantages, algorithm.kl_reward
    if not algorithm.needs_reference:
        for key in ("model", "refresh_every"):
            if getattr(algorithm.reference, key):
                yield f"reference.{key}: nothing reads a reference model; set loss.kl or kl_reward, or leave it out"
    if kl_reward is None:
        return
    for key in ("target", "horizon"):
        if kl_reward.type == "fixed" and getattr(kl_reward, key) != type(kl_reward).model_fields[key].default:
            yield f"kl_reward.{key}: a fixed coefficient has none; set kl_reward.type: adaptive, or leave it out"
    if isinstance(advantages, ComponentAdvantages | PassAtKAdvantages):
        yield f"kl_reward: advantages of type {advantages.type} have no place for it; set loss.kl instead"


def _of_shaping(algorithm: AlgorithmConfig) -> Iterator[str]:
    shapes = algorithm.shaping.model_copy(update={"truncated": "train"}) != ShapingConfig()
    if shapes and isinstance(algorithm.advantages, ComponentAdvantages):
        yield (
            "shaping: advantages of type gdpo read each reward before it; only `truncated` may be set, or use a reward "
            "of the length"
        )
    rescale, factor = algorithm.shaping.rescale, algorithm.shaping.truncated_factor
    if rescale is not None and rescale.target[0] < 0 and factor is not None and factor < 1:
        yield (
            f"shaping.truncated_factor: {factor} of a reward below 0, as shaping.rescale.target {rescale.target} makes "
            "them, is a better one; rescale to rewards from 0 up, or leave one of them out"
        )


def _of_the_correction(algorithm: AlgorithmConfig) -> Iterator[str]:
    correction, policy = algorithm.correction, algorithm.loss.policy
    if correction.weight is not None and _compares_with_rollout(policy, correction.proximal):
        bypass = correction.proximal == "bypass"
        yield (
            f"correction.weight: with {'correction.proximal bypass' if bypass else 'loss.policy.anchor rollout'} the "
            f"ratio of a {policy.type} loss is to the rollout policy already, and a weight would count it twice; set "
            "correction.weight: null, or loss.policy: reinforce, which has no ratio"
        )


def _compares_with_rollout(policy: PolicyLoss, proximal: str) -> bool:
    """Whether the loss has a ratio to the policy that sampled."""
    if isinstance(policy, RatioOptions):
        return policy.anchor == "rollout" or (policy.anchor == "proximal" and proximal == "bypass")
    return isinstance(policy, GmpoLoss | DroLoss | VespoLoss) and proximal == "bypass"


def _of_the_loss(algorithm: AlgorithmConfig) -> Iterator[str]:
    loss, correction = algorithm.loss, algorithm.correction
    if (
        not loss.ptx.coef
        and loss.ptx.rows_per_minibatch != type(loss.ptx).model_fields["rows_per_minibatch"].default
    ):
        yield (
            f"loss.ptx.rows_per_minibatch: {loss.ptx.rows_per_minibatch} rows are never taken with loss.ptx.coef 0; "
            "set that too, or leave it out"
        )
    if loss.ptx.positive_coef and correction.rejections and correction.denominator == "kept":
        yield (
            "loss.ptx.positive_coef: its count is known before the correction, and that of correction.denominator kept "
            "only afterwards; set correction.denominator: all"
        )
    tables = {"loss.aggregation": loss.aggregation}
    if algorithm.critic is not None:
        tables["critic.loss.aggregation"] = algorithm.critic.loss.aggregation
        if algorithm.critic.loss.error == "squared" and algorithm.critic.loss.huber_delta != 10.0:
            yield "critic.loss.huber_delta: a squared error has none; set critic.loss.error: huber, or leave it out"
    for key, table in tables.items():
        if table.length is not None and table.mode != "seq-mean-token-sum-norm":
            yield (
                f"{key}.length: {table.mode} does not read it; set {key}.mode: seq-mean-token-sum-norm, or leave it out"
            )
    if loss.top_entropy_share is not None and isinstance(loss.policy, ClipCovLoss | KlCovLoss):
        yield f"loss.top_entropy_share: {loss.policy.type} selects tokens itself; use another one, or leave it out"
