"""The loss: a policy loss by name, how tokens become one number, and what is added to it.

`preset: PEER` starts from all conventions of a peer (loss_presets.py); whatever is written beside it wins.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from asyncrl.config.loss_presets import PEERS, VALUE_PEERS, policy_options, with_preset, with_value_preset
from asyncrl.config.table import Positive, Table, names_a_function

AboveZero = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class RatioOptions(Table):
    """The importance ratio r = exp(learner - proximal log-probs) of a loss."""

    ratio: Literal["token", "sequence", "sequence_token", "sequence_sum"] = "token"
    """One a token; of the trajectory, exp of the mean log ratio (GSPO), with the gradient through the mean
    (`sequence`) or through each token's own log-prob (`sequence_token`); or exp of the sum (RLOO)."""
    max_log_ratio: AboveZero | None = 20.0
    """Log ratios are cut to +- this before exp."""
    anchor: Literal["proximal", "rollout", "learner"] = "proximal"
    """What the ratio compares with: the learner before the batch's first step, the policy that sampled, or the learner
    itself: then the ratio is 1 and only its gradient is left."""
    mean_advantages: bool = False
    """Every token gets the mean advantage of its trajectory (AReaL with sequence ratios)."""


class PpoLoss(RatioOptions):
    """max(-r A, -clip(r) A): PPO (arXiv:1707.06347), DAPO's clip-higher, dual clip."""

    type: Literal["ppo"] = "ppo"
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: AboveZero = 0.2
    """See clip_low."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Where A < 0 the loss is at most -dual_clip * A."""
    max_ratio: AboveZero | None = None
    """Upper bound of the ratio in the branch that is not clipped (TRL's `delta`)."""


class GspoLoss(PpoLoss):
    """GSPO (arXiv:2507.18071): PPO's clip of the trajectory's ratio. LUSPO is GSPO with `seq-mean-token-sum`."""

    type: Literal["gspo"] = "gspo"  # pyright: ignore[reportIncompatibleVariableOverride]
    ratio: Literal["token", "sequence", "sequence_token", "sequence_sum"] = "sequence"
    """As for `ppo`."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 3e-4
    """As for `ppo`."""
    clip_high: AboveZero = 4e-4
    """As for `ppo`."""


class GmpoLoss(Table):
    """GMPO (arXiv:2507.20673): the geometric mean of clipped token ratios."""

    type: Literal["gmpo"] = "gmpo"
    clip_low: AboveZero = 0.4
    """A log ratio is clipped to [-clip_low, clip_high]."""
    clip_high: AboveZero = 0.4
    """See clip_low."""


class CispoLoss(RatioOptions):
    """CISPO (arXiv:2506.13585): -clip(r) A log pi, no gradient through the ratio."""

    type: Literal["cispo"] = "cispo"
    ratio_min: NotNegative = 0.0
    """Lower bound of the ratio itself."""
    ratio_max: AboveZero = 5.0
    """Upper bound of the ratio itself (not of its distance from 1)."""
    outside: Literal["clip", "zero"] = "clip"
    """A ratio out of bounds is cut to them, or its token left out."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.ratio_min > self.ratio_max:
            raise ValueError(f"ratio_min {self.ratio_min} is above ratio_max {self.ratio_max}; lower it")
        return self


class SapoLoss(RatioOptions):
    """SAPO (arXiv:2511.20347): -(4 / tau) sigmoid(tau (r - 1)) A."""

    type: Literal["sapo"] = "sapo"
    tau_positive: AboveZero = 1.0
    """For A > 0."""
    tau_negative: AboveZero = 1.05
    """For the others."""


class DppoLoss(RatioOptions):
    """DPPO (arXiv:2602.04879): -r A, but 0 for tokens whose probability has moved too far."""

    type: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    """|p - q|, or the KL of the two Bernoulli distributions, of the sampled token's probabilities."""
    delta_low: NotNegative = 0.2
    """Bound where A < 0."""
    delta_high: NotNegative = 0.2
    """Bound where A > 0."""
    max_ratio: AboveZero | None = None
    """Upper bound of the ratio."""
    score_function: bool = False
    """-stop_gradient(r) A log pi: a bounded ratio keeps a gradient (verl)."""


class IpoLoss(RatioOptions):
    """prime-rl's `ipo`: -r A, but 0 for tokens whose probability moved by more than `threshold`."""

    type: Literal["ipo"] = "ipo"
    threshold: AboveZero = 0.1
    """Of |p - q|."""


class ClipCovLoss(PpoLoss):
    """Clip-Cov (arXiv:2505.22617): PPO without the gradient of a few tokens of high covariance."""

    type: Literal["clip_cov"] = "clip_cov"  # pyright: ignore[reportIncompatibleVariableOverride]
    share: Share = 0.0002
    """Of the mini-batch's tokens, at least one."""
    lowest: float = 1.0
    """Tokens are drawn from those with a covariance between lowest and highest."""
    highest: float = 5.0
    """See lowest."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.lowest >= self.highest:
            raise ValueError(
                f"lowest {self.lowest} is not below highest {self.highest}; no token lies between them"
            )
        return self


class KlCovLoss(RatioOptions):
    """KL-Cov (arXiv:2505.22617): -r A, with a penalty on the tokens of highest covariance."""

    type: Literal["kl_cov"] = "kl_cov"
    share: Share = 0.0002
    """Of the mini-batch's tokens, at least one."""
    coef: NotNegative = 1.0
    """Of |log r| at those tokens."""


class ReinforceLoss(Table):
    """-A log pi (REINFORCE, GPG)."""

    type: Literal["reinforce"] = "reinforce"


class ImportanceWeightedLoss(RatioOptions):
    """-r A without a trust region."""

    type: Literal["importance_weighted"] = "importance_weighted"


class DroLoss(Table):
    """DRO (arXiv:2405.19107), per token: -(A log pi - beta / 2 (log r)^2)."""

    type: Literal["dro"] = "dro"
    beta: NotNegative = 0.5
    """Of the squared log ratio."""


class VespoLoss(Table):
    """VESPO (arXiv:2602.10693): -phi(w) A log pi, phi(w) = e^lambda w^k e^(-lambda w) of the trajectory's ratio w."""

    type: Literal["vespo"] = "vespo"
    k_positive: AboveZero = 2.0
    """For A >= 0."""
    lambda_positive: AboveZero = 3.0
    """For A >= 0."""
    k_negative: AboveZero = 3.0
    """For A < 0."""
    lambda_negative: AboveZero = 2.0
    """For A < 0."""


class CrossEntropyLoss(Table):
    """-log pi: supervised fine-tuning on the tokens at hand; advantages are not read."""

    type: Literal["cross_entropy"] = "cross_entropy"


class CustomLoss(Table):
    """A loss of your own."""

    type: Literal["custom"] = "custom"
    function: str
    """`module:attr` or `path/to/file.py:attr` of f(tokens: LossTokens, **options) -> Tensor [N], with gradient."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of every call."""

    @field_validator("function")
    @classmethod
    def _named(cls, value: str) -> str:
        return names_a_function(value)


PolicyLoss = Annotated[
    PpoLoss
    | GspoLoss
    | GmpoLoss
    | CispoLoss
    | SapoLoss
    | DppoLoss
    | IpoLoss
    | ClipCovLoss
    | KlCovLoss
    | ReinforceLoss
    | ImportanceWeightedLoss
    | DroLoss
    | VespoLoss
    | CrossEntropyLoss
    | CustomLoss,
    Field(discriminator="type"),
    BeforeValidator(policy_options),
]
"""A table, or a name alone; `ppo` without one."""


class AggregationConfig(Table):
    """From one loss a token to one number: sum of weight * loss / denominator."""

    mode: Literal[
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
        "prompt-mean",
    ] = "token-mean"
    """verl's names; `prompt-mean` is the mean over groups of each one's token mean."""
    length: AboveZero | None = None
    """Constant of `seq-mean-token-sum-norm`; null: rollout.max_completion_tokens."""
    divide_by: (
        Literal["one", "tokens", "trajectories", "trained_trajectories", "groups"] | AboveZero | None
    ) = None
    """The denominator: a count of the mini-batch, or a number; null: what the mode says."""
    at_least: NotNegative = 1.0
    """No count is taken smaller; 0 makes the loss of a mini-batch without a token NaN."""


class KlConfig(Table):
    """coef * KL(learner || reference), added to the policy loss."""

    coef: NotNegative = 0.001
    """0: measured only."""
    reference: Literal["ref", "proximal", "rollout"] = "ref"
    """Whose log-probs: the reference model's, the proximal policy's, the sampler's."""
    estimator: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Of the KL from the sampled token."""
    clamp_log_ratio: AboveZero | None = None
    """Cut the log ratio before."""
    clamp_estimate: AboveZero | None = None
    """Cut the estimate after."""
    gradient_of_k2: bool = False
    """The estimator's value with the gradient of k2."""
    weight: Literal["none", "score_function", "ratio", "rollout_ratio"] = "none"
    """Multiply the estimate: by 1 with the score-function gradient (NeMo), or by the ratio to the proximal
    policy (TRL's bias correction) or to the sampler, with its gradient."""


class EntropyConfig(Table):
    """-coef * entropy, added to the policy loss."""

    coef: float = 0.0
    """Above 0: a bonus for entropy."""
    estimate: Literal["distribution", "sampled"] = "distribution"
    """Of the whole distribution, or -p log p of the sampled token (Megatron-RL)."""

    @property
    def needs_gradient(self) -> bool:
        """Whether the entropies of the whole distributions carry a gradient: one more array of a chunk's logits."""
        return self.coef != 0 and self.estimate == "distribution"


class PtxConfig(Table):
    """coef * cross entropy of other tokens (InstructGPT's PPO-ptx, arXiv:2203.02155), or of good answers (VAPO)."""

    coef: NotNegative = 0.0
    """Of the token mean over the supervised tokens of the step, which are of `data.supervised`; temperature 1."""
    rows_per_minibatch: Positive = 8
    """Rows of `data.supervised` that every optimizer step takes, over all ranks."""
    positive_coef: NotNegative = 0.0
    """Of the token mean over the trajectories whose reward, after shaping, is above 0."""


class LossConfig(Table):
    """The loss of a mini-batch."""

    preset: Literal[PEERS] | None = None  # pyright: ignore[reportInvalidTypeForm]
    """Start from a peer's conventions for this type of policy loss."""
    policy: PolicyLoss = PpoLoss()
    """By `type`: a table, a name alone (gspo, cispo, ...), or `module:attr` of your own."""
    aggregation: AggregationConfig = AggregationConfig()
    """Of the policy loss, the KL and the entropy."""
    kl: KlConfig | None = None
    """null: no KL in the loss."""
    entropy: EntropyConfig = EntropyConfig()
    """The entropy bonus."""
    ptx: PtxConfig = PtxConfig()
    """Cross entropy beside the policy loss."""
    top_entropy_share: Share | None = None
    """Only this share of tokens, those of highest entropy, keep their policy loss."""

    @property
    def selects_tokens(self) -> bool:
        """Whether tokens are chosen once a mini-batch, before its first step."""
        return self.top_entropy_share is not None or isinstance(self.policy, ClipCovLoss | KlCovLoss)

    @model_validator(mode="before")
    @classmethod
    def _preset_below(cls, value: Any) -> Any:
        return with_preset(value) if isinstance(value, dict) else value


class ValueLossConfig(Table):
    """The critic's loss."""

    preset: Literal[VALUE_PEERS] | None = None  # pyright: ignore[reportInvalidTypeForm]
    """Start from a peer's conventions."""
    clip: AboveZero | None = 0.2
    """New values may leave the old ones by this; null: freely."""
    error: Literal["squared", "huber"] = "squared"
    """Of the value against the return."""
    huber_delta: AboveZero = 10.0
    """Where `huber` turns linear."""
    aggregation: AggregationConfig = AggregationConfig()
    """Of the tokens' errors."""

    @model_validator(mode="before")
    @classmethod
    def _preset_below(cls, value: Any) -> Any:
        return with_value_preset(value) if isinstance(value, dict) else value


class KlControllerConfig(Table):
    """The coefficient of the KL in the reward over a run."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` steers the KL towards `target` (arXiv:1909.08593)."""
    coef: NotNegative = 0.001
    """At the start."""
    target: AboveZero = 0.1
    """Of `adaptive`."""
    horizon: AboveZero = 10000.0
    """Of `adaptive`: trajectories over which an error of 1 would be made good."""
