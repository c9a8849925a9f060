"""`algorithm.correction`: what makes up for tokens that another policy sampled than the one being trained."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from asyncrl.config.correction_presets import CORRECTION_PRESETS
from asyncrl.config.table import Table

Bound = Annotated[float, Field(ge=0)]


def _check_order(lower: float | None, upper: float | None) -> None:
    if lower is not None and upper is not None and lower > upper:
        raise ValueError(f"lower {lower} is above upper {upper}")


class ImportanceWeight(Table):
    """The ratio corrected policy / rollout policy that multiplies the policy loss, without a gradient of its own."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """`token`: each token's ratio. `sequence`: the product over a trajectory. `geometric`: its geometric mean."""
    outside: Literal["truncate", "zero"] = "truncate"
    """What becomes of a ratio outside the bounds: moved to the bound (TIS), or 0 (IcePop)."""
    lower: Bound | None = None
    """Lower bound of the ratio."""
    upper: Annotated[float, Field(gt=0)] | None = 2.0
    """Upper bound of the ratio; null is unbounded."""
    batch_normalize: bool = False
    """Divide by the batch's mean weight: over tokens, or over trajectories unless `level` is `token`."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _check_order(self.lower, self.upper)
        return self


class BoundsRejection(Table):
    """Takes tokens out of the loss where a statistic of two policies leaves [lower, upper]."""

    type: Literal["bounds"] = "bounds"
    statistic: Literal[
        "ratio",
        "k1",
        "k2",
        "k3",
        "reverse_k3",
        "ratio_deviation",
        "multiplicative_error",
        "probability_difference",
    ] = "ratio"
    """With r the ratio of `between`, new / old. `ratio`: r, aggregated as a product. `k1`: -log r, `k2`: (log r)^2 / 2,
    `k3`: r - 1 - log r, estimates of KL(old || new); `reverse_k3`: 1/r - 1 + log r. `ratio_deviation`: |r - 1|.
    `multiplicative_error`: exp |log r|. `probability_difference`: new - old."""
    over: Literal["token", "sum", "mean", "max", "any"] = "token"
    """`token` rejects single tokens. The others reject whole trajectories: by the sum of the statistic (for `ratio` the
    product), its mean (the geometric mean), its maximum, or when `any` token leaves the bounds."""
    lower: float | None = None
    """The smallest value that is kept; in nats for k1, a ratio for `ratio`."""
    upper: float | None = None
    """The largest value that is kept. With neither bound the statistic is only reported."""
    between: Literal["corrected_rollout", "learner_rollout", "learner_proximal"] = "corrected_rollout"
    """The two policies, new and old."""
    only: Literal["all", "negative_advantage", "diverging"] = "all"
    """Which tokens may be rejected: all; those with a negative advantage; those that the loss pushes further away,
    (log r) * advantage > 0."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.statistic == "ratio" and any(
            bound is not None and bound <= 0 for bound in (self.lower, self.upper)
        ):
            raise ValueError("bounds of a ratio are above 0; null is no bound")
        _check_order(self.lower, self.upper)
        return self


class M2poRejection(Table):
    """M2PO (arXiv:2510.01161): drops the batch's largest (log ratio)^2 until the rest's mean is under `threshold`."""

    type: Literal["m2po"] = "m2po"
    threshold: Annotated[float, Field(gt=0)] = 0.04
    """In squared nats."""


Rejection = Annotated[BoundsRejection | M2poRejection, Field(discriminator="type")]


class OffPolicyCorrection(Table):
    """Which policy the ratio compares with, importance weights, and which tokens are rejected."""

    preset: str | None = None
    """A convention by name (asyncrl/config/correction_presets.py); the other keys override it."""
    proximal: Literal["recompute", "bypass", "log_linear"] = "recompute"
    """The policy that the loss's ratio compares with. `recompute`: the learner before the batch's first step, scored by
    a forward pass (decoupled PPO, arXiv:2505.24298). `bypass`: the rollout policy itself. `log_linear`: between rollout
    and learner by the version of each token, without a forward pass."""
    weight: ImportanceWeight | None = ImportanceWeight()
    """Importance weights; null is a weight of 1. Under `bypass` they belong to losses without a ratio."""
    rejections: tuple[Rejection, ...] = ()
    """Criteria, all of which a token must pass."""
    in_order: bool = False
    """Each criterion, and at last the weight, sums over the tokens that the ones before it kept; else over all."""
    denominator: Literal["all", "kept"] = "all"
    """Whether rejected tokens still count in the loss's denominator. With `kept`, rejecting many tokens makes the
    others' gradients larger."""
    max_log_ratio: Annotated[float, Field(gt=0)] | None = 20.0
    """Log ratios are cut to +-this before exp; null leaves them."""
    count_empty: bool = False
    """Whether means over trajectories in the diagnostics count those without a trained token, at a log ratio of 0."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("preset") is None:
            return value
        if value["preset"] not in CORRECTION_PRESETS:
            raise ValueError(f"no preset {value['preset']!r}; there are {', '.join(CORRECTION_PRESETS)}")
        preset = CORRECTION_PRESETS[value["preset"]]
        merged = {**preset, **value}
        if isinstance(preset.get("weight"), dict) and isinstance(value.get("weight"), dict):
            merged["weight"] = {**preset["weight"], **value["weight"]}
        return merged

    @field_validator("rejections", mode="before")
    @classmethod
    def _bounds_by_default(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        return tuple({"type": "bounds", **item} if isinstance(item, dict) else item for item in value)

    @property
    def needs_advantages(self) -> bool:
        return any(isinstance(r, BoundsRejection) and r.only != "all" for r in self.rejections)

    @property
    def needs_whole_batch(self) -> bool:
        """Whether a token's fate depends on tokens of other trajectories."""
        normalizes = self.weight is not None and self.weight.batch_normalize
        return normalizes or any(isinstance(r, M2poRejection) for r in self.rejections)
