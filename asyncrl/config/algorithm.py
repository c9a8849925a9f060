"""`algorithm`: the recipe and its corrections."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from asyncrl.config.table import Table


class TruncatedImportanceSampling(Table):
    """w = min(exp(proximal_logprobs - rollout_logprobs), cap), per token, no gradient through it."""

    type: Literal["tis"] = "tis"
    cap: Annotated[float, Field(gt=0)] = 2.0
    """Upper bound of the importance weight."""


class NoCorrection(Table):
    """Every importance weight is 1."""

    type: Literal["none"] = "none"


class GrpoConfig(Table):
    """GRPO (arXiv:2402.03300): advantages from the rewards of one prompt's group, clipped policy loss."""

    type: Literal["grpo"] = "grpo"
    scale: Literal["std", "none"] = "std"
    """Divide centred rewards by the group's standard deviation (n - 1), or leave them (Dr.GRPO)."""
    std_epsilon: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the standard deviation."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The probability ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """See clip_low."""
    correction: Annotated[TruncatedImportanceSampling | NoCorrection, Field(discriminator="type")] = (
        TruncatedImportanceSampling()
    )
    """Off-policy correction of tokens that an older version, or another engine, sampled: `tis` or `none`."""

    @field_validator("correction", mode="before")
    @classmethod
    def _tis_by_default(cls, value: Any) -> Any:
        return {"type": "tis", **value} if isinstance(value, dict) else value
