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
    CustomAdvantages,
    GaeAdvantages,
    OutcomeAdvantages,
    Whitened,
    Whitening,
    advantage_options,
)
from asyncrl.config.contradictions import contradictions
from asyncrl.config.correction_presets import CORRECTION_PRESETS
from asyncrl.config.corrections import OffPolicyCorrection
from asyncrl.config.loss_presets import PEERS, VALUE_PEERS, policy_options
from asyncrl.config.losses import CrossEntropyLoss, KlControllerConfig, LossConfig, ValueLossConfig
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
    """A peer's whole convention: the preset of advantages, loss, correction and critic.loss where they name none."""
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
        if not isinstance(value, dict) or not isinstance(value.get("type", "grpo"), str):
            return value
        recipe = find_recipe(value.get("type", "grpo"))
        tree = merged(_spelled_out(recipe.options), _spelled_out(value))
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
    def _can_be_meant(self) -> AlgorithmConfig:
        for said in contradictions(self):
            raise ValueError(said)
        return self

    @property
    def compares_within_groups(self) -> bool:
        """Whether a trajectory is compared with others of its prompt: alone, or with equal rewards, it teaches
        nothing."""
        advantages = self.advantages
        if isinstance(advantages, OutcomeAdvantages):
            return advantages.baseline not in ("greedy", "none") and advantages.baseline_over == "group"
        return not isinstance(advantages, GaeAdvantages | CustomAdvantages)

    @property
    def learns_nothing_from_equal_rewards(self) -> bool:
        """Whether a batch teaches nothing whose groups have equal rewards each, regularisers aside."""
        reads_more = isinstance(self.advantages, ComponentAdvantages) or self.kl_reward is not None
        is_supervised = isinstance(self.loss.policy, CrossEntropyLoss) or self.loss.ptx.positive_coef > 0
        return self.compares_within_groups and not reads_more and not is_supervised

    @property
    def needs_reference(self) -> bool:
        """Whether some term reads the reference model."""
        return self.kl_reward is not None or (self.loss.kl is not None and self.loss.kl.reference == "ref")

    @property
    def token_whitening(self) -> Whitening | None:
        """What is done to the advantages with the moments of all ranks' tokens."""
        advantages = self.advantages
        if isinstance(advantages, Whitened):
            return advantages.token_whitening
        return advantages.whiten if isinstance(advantages, GaeAdvantages | CustomAdvantages) else None


def _spelled_out(tree: dict[str, Any]) -> dict[str, Any]:
    """Names alone as the tables that they stand for, so that keys can be put on top of them."""
    tree, loss = dict(tree), tree.get("loss")
    if "advantages" in tree:
        tree["advantages"] = advantage_options(tree["advantages"])
    if isinstance(loss, dict) and isinstance(policy := loss.get("policy"), str):
        tree["loss"] = {**loss, "policy": policy_options(policy)}
    return tree


def _with_tuples(value: Any) -> Any:
    """Lists are tuples in every table here, and pydantic knows JSON's lists only before a validator has seen them."""
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(_with_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def _put_preset(tree: dict[str, Any], peer: str) -> None:
    """The peer's preset into each table that names none, where there is one of that peer."""
    advantages = tree.get("advantages", {})
    if isinstance(advantages, dict) and advantages.get("type") != "custom":
        tree["advantages"] = {"preset": peer, **advantages}
    for part, peers in (("loss", PEERS), ("correction", CORRECTION_PRESETS)):
        table = tree.get(part, {})
        if isinstance(table, dict) and peer in peers:
            tree[part] = {"preset": peer, **table}
    critic = tree.get("critic")
    if isinstance(critic, dict) and peer in VALUE_PEERS and isinstance(critic.get("loss", {}), dict):
        tree["critic"] = {**critic, "loss": {"preset": peer, **critic.get("loss", {})}}
