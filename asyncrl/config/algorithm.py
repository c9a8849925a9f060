"""`algorithm`: a recipe by name, and the options of its stages.

    algorithm: dapo
    algorithm: {type: ppo, preset: verl, advantages: {type: gae, lam: 0.95}, critic: {lr: 1.0e-5}}

A recipe (recipes.py) is a list of stages and what their options are unless you write others.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from asyncrl.config.advantage_presets import Peer
from asyncrl.config.advantages import (
    AdvantagesConfig,
    ComponentAdvantages,
    GaeAdvantages,
    OutcomeAdvantages,
    PassAtKAdvantages,
)
from asyncrl.config.correction_presets import CORRECTION_PRESETS
from asyncrl.config.corrections import OffPolicyCorrection
from asyncrl.config.losses import (
    CrossEntropyLoss,
    KlControllerConfig,
    LossConfig,
    ReinforceLoss,
    ValueLossConfig,
)
from asyncrl.config.recipes import check_stages, find_recipe, merged
from asyncrl.config.shaping import FilterConfig, ShapingConfig
from asyncrl.config.table import Positive, Table

NotNegative = Annotated[float, Field(ge=0)]


class KlRewardConfig(KlControllerConfig):
    """reward - coef * KL(learner || reference) at each token, before advantages (InstructGPT, arXiv:2203.02155)."""

    estimator: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Of the KL from the sampled token."""
    clamp_estimate: Annotated[float, Field(gt=0)] | None = None
    """Cut the estimate to +- this."""
    clip_reward: Annotated[float, Field(gt=0)] | None = None
    """Cut the trajectory's reward to +- this before the KL is subtracted (DeepSpeed-Chat: 5)."""


class ReferenceConfig(Table):
    """The frozen model of the KL terms. It is loaded only where one reads it."""

    model: str | None = None
    """Name or folder, with the policy's tokenizer; null: the policy's version 0."""
    refresh_every: Annotated[int, Field(ge=0)] = 0
    """Versions after which the policy's weights become the reference's; 0: never."""


class CriticConfig(Table):
    """The value model of recipes that have one."""

    model: str | None = None
    """Name or folder of its body, with the policy's tokenizer; null: the policy's version 0."""
    shared: bool = False
    """A value head on the policy's own body instead of a model of its own; its loss trains the body too."""
    coef: NotNegative = 0.1
    """`shared`: what the value loss is multiplied by beside the policy's. Else the critic has its own optimizer."""
    lr: NotNegative = 1e-5
    """Its learning rate, warmed up like the policy's."""
    warmup_versions: Annotated[int, Field(ge=0)] = 0
    """Versions in which only the critic trains."""
    epochs: Positive | None = None
    """Passes over a batch; null: learner.epochs."""
    loss: ValueLossConfig = ValueLossConfig()
    """By token."""


class AlgorithmConfig(Table):
    """What turns a batch into a version."""

    type: str = "grpo"
    """A recipe by name, or `module:attr` of one of your own (a `Recipe`)."""
    preset: Peer | None = None
    """A peer's whole convention: the preset of advantages, loss and correction where they name none."""
    stages: tuple[str, ...] = ()
    """The recipe's stages in order; a stage of your own is `module:attr`. Left out: the recipe's."""
    shaping: ShapingConfig = ShapingConfig()
    """Of rewards, a group at a time as it arrives."""
    filter: FilterConfig = FilterConfig()
    """Which groups are trained; others take the place of those that are not."""
    max_filtered_batches: Positive = 10
    """The run ends when so many batches of groups in a row were filtered."""
    kl_reward: KlRewardConfig | None = None
    """KL in the reward; null: none."""
    reference: ReferenceConfig = ReferenceConfig()
    """The reference model."""
    advantages: AdvantagesConfig = OutcomeAdvantages()
    """From rewards to one advantage a token: a table, a name (grpo, rloo, gae, ...), or `module:attr`."""
    loss: LossConfig = LossConfig()
    """The loss of a mini-batch."""
    correction: OffPolicyCorrection = OffPolicyCorrection()
    """Of tokens that an older version, or another engine, sampled."""
    critic: CriticConfig | None = None
    """null: no critic."""
    target_kl: Annotated[float, Field(gt=0)] | None = None
    """No further step of a batch once the mean KL of a mini-batch to the proximal policy (k1) exceeds 1.5 x this."""

    @model_validator(mode="before")
    @classmethod
    def _recipe_below(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        recipe = find_recipe(value.get("type", "grpo"))
        tree = merged(recipe.options, value)
        tree["stages"] = value.get("stages") or recipe.stages
        peer = value.get("preset")
        if isinstance(peer, str) and peer in get_args(Peer):
            _put_preset(tree, peer)
        return _with_tuples(tree)

    @field_validator("stages")
    @classmethod
    def _in_order(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        check_stages(value)
        return value

    @model_validator(mode="after")
    def _combinations(self) -> AlgorithmConfig:
        if isinstance(self.advantages, GaeAdvantages) and (
            self.critic is None or "values" not in self.stages
        ):
            raise ValueError(
                "advantages of type gae read the values of a critic; use the recipe ppo, or critic: {} and its stages, "
                "or use other advantages"
            )
        if self.critic is not None and "critic" not in self.stages:
            raise ValueError(
                f"critic: the stages of {self.type!r} have none; leave it out, or use the recipe ppo"
            )
        self._check_stages_are_there()
        self._check_critic()
        self._check_rewards_are_read()
        rejects = bool(self.correction.rejections) and self.correction.denominator == "kept"
        shares = self.critic is not None and self.critic.shared
        if rejects and (self.loss.ptx.coef or self.loss.ptx.positive_coef or shares):
            raise ValueError(
                "correction.denominator kept and loss.ptx, or critic.shared, divide by two counts of which one is "
                "known only afterwards; set denominator: all"
            )
        has_ratio = not isinstance(self.loss.policy, ReinforceLoss | CrossEntropyLoss)
        has_ratio = has_ratio and getattr(self.loss.policy, "anchor", "") != "learner"
        if self.correction.proximal == "bypass" and self.correction.weight is not None and has_ratio:
            raise ValueError(
                f"correction.weight is the ratio to the rollout policy, and under proximal: bypass so is the ratio of "
                f"loss.policy {self.loss.policy.type!r}; set correction.weight: null"
            )
        return self

    def _check_stages_are_there(self) -> None:
        advantages, correction = self.advantages, self.correction
        whitens = getattr(advantages, "whiten", None) is not None
        for key, asks, stage in (
            ("filter", self.filter != FilterConfig(), "filter"),
            ("shaping", self.shaping != ShapingConfig(), "shape"),
            ("kl_reward", self.kl_reward is not None, "kl_reward"),
            ("kl_reward, or loss.kl,", self.needs_reference, "reference"),
            ("critic", self.critic is not None, "values"),
            ("advantages.whiten", whitens, "whiten"),
            ("correction", correction.needs_whole_batch, "correct"),
            ("loss", self.loss.selects_tokens, "select"),
        ):
            if asks and stage not in self.stages:
                raise ValueError(f"{key} asks for the stage {stage!r}, which the stages have not; add it")

    def _check_critic(self) -> None:
        critic = self.critic
        if critic is None:
            return
        if not isinstance(self.advantages, GaeAdvantages):
            raise ValueError(
                f"critic: advantages of type {self.advantages.type} read no values; use gae, or leave it out"
            )
        if critic.shared and critic.warmup_versions:
            raise ValueError(
                f"critic.warmup_versions {critic.warmup_versions} trains the critic alone, and a shared one is the "
                "policy's body too; set warmup_versions: 0, or shared: false"
            )

    def _check_rewards_are_read(self) -> None:
        """What changes the trajectory's reward must not be lost on advantages that read something else."""
        advantages, shaping = self.advantages, self.shaping
        if self.kl_reward is not None and isinstance(advantages, ComponentAdvantages | PassAtKAdvantages):
            raise ValueError(
                f"kl_reward: advantages of type {advantages.type} leave no place for it; use loss.kl"
            )
        shapes = shaping.model_copy(update={"truncated": "train"}) != ShapingConfig()
        if shapes and isinstance(advantages, ComponentAdvantages):
            raise ValueError(
                "shaping: advantages of type gdpo read each reward before it; only `truncated` may be set, or use a "
                "reward of the length"
            )

    @property
    def compares_within_groups(self) -> bool:
        """Whether a trajectory is compared with others of its prompt: alone, or with equal rewards, it teaches
        nothing."""
        advantages = self.advantages
        if isinstance(advantages, OutcomeAdvantages):
            return advantages.baseline not in ("greedy", "none") and advantages.baseline_over == "group"
        return not isinstance(advantages, GaeAdvantages)

    @property
    def needs_reference(self) -> bool:
        """Whether some term reads the reference model."""
        return self.kl_reward is not None or (self.loss.kl is not None and self.loss.kl.reference == "ref")


def _with_tuples(value: Any) -> Any:
    """Lists are tuples in every table here, and pydantic knows JSON's lists only before a validator has seen them."""
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(_with_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def _put_preset(tree: dict[str, Any], peer: str) -> None:
    """The peer's preset into each table that names none and has one of that peer."""
    for part in ("advantages", "loss", "correction"):
        if part == "correction" and peer not in CORRECTION_PRESETS:
            continue
        table = tree.get(part, {})
        table = {"type": table} if isinstance(table, str) else table
        if isinstance(table, dict):
            tree[part] = {"preset": peer, **table}
