"""Reward shaping and filters: what happens to a group between its rollouts and its batch."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from asyncrl.config.table import Positive, Table

NonNegative = Annotated[float, Field(ge=0)]


class OverlongPenalty(Table):
    """Soft punishment of long answers (DAPO, arXiv:2503.14476): 0 up to max_tokens - buffer_tokens, falling linearly
    to -factor at max_tokens."""

    max_tokens: Positive | None = None
    """The length at which the penalty is `factor`; null: rollout.max_completion_tokens. Tokens."""
    buffer_tokens: Positive | None = None
    """Over how many tokens it grows; null: a fifth of max_tokens. Tokens."""
    factor: NonNegative = 1.0
    """The penalty at max_tokens, in units of the reward."""
    beyond: Literal["cap", "grow"] = "cap"
    """Above max_tokens (several turns): stay at `factor`, or grow on."""

    def resolved(self, max_completion_tokens: int) -> OverlongPenalty:
        """With numbers in place of null."""
        max_tokens = self.max_tokens or max_completion_tokens
        buffer_tokens = self.buffer_tokens or max(1, max_tokens // 5)
        return self.model_copy(update={"max_tokens": max_tokens, "buffer_tokens": buffer_tokens})

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if (
            self.max_tokens is not None
            and self.buffer_tokens is not None
            and self.buffer_tokens > self.max_tokens
        ):
            raise ValueError(
                f"buffer_tokens ({self.buffer_tokens}) must be at most max_tokens ({self.max_tokens})"
            )
        return self


class Rescaling(Table):
    """Rewards from one interval to another, linearly; those outside `source` are cut to it."""

    source: tuple[float, float] = (0.0, 1.0)
    """(lowest, highest) reward as given."""
    target: tuple[float, float] = (-1.0, 1.0)
    """What they become."""

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.source[0] >= self.source[1]:
            raise ValueError(f"source {self.source} must be (lowest, highest), and not empty")
        return self


class ShapingConfig(Table):
    """What becomes of one trajectory's reward and loss, in this order. Filters read the reward before all of it."""

    rescale: Rescaling | None = None
    """Rewards to another interval."""
    truncated_factor: Annotated[float, Field(ge=0, le=1)] | None = None
    """The reward of an answer that did not stop by itself is multiplied by this; null: 1."""
    overlong: OverlongPenalty | None = None
    """Soft penalty of length."""
    truncated: Literal["train", "mask"] = "train"
    """Answers that did not stop by themselves: `mask` takes their tokens out of the loss; their reward still counts
    in the group's statistics (overlong filtering)."""


class FilterConfig(Table):
    """Which groups are worth training (dynamic sampling, DAPO). The next prompts take the place of the others."""

    keep: Literal["all", "spread", "mean_between"] = "all"
    """`spread`: the metric differs within the group. `mean_between`: its mean is inside `between`."""
    metric: str | None = None
    """Label of a reward whose value before weights is looked at; null: the trajectory's reward, before shaping."""
    tolerance: NonNegative = 0.0
    """`spread`: the metric must differ by more than this."""
    measure: Literal["range", "sample_std", "population_std"] = "range"
    """`spread`: largest minus smallest, which is exact, or a deviation, in which rounding makes a group of equal
    0.1 differ."""
    between: tuple[float, float] = (0.0, 1.0)
    """`mean_between`: open interval."""
    group_of_one: Literal["keep", "drop"] = "drop"
    """`spread`: a trajectory that nothing can be compared with."""

    @model_validator(mode="after")
    def _between_is_open(self) -> Self:
        if self.between[0] >= self.between[1]:
            raise ValueError(f"between {self.between} must be (lowest, highest), and not empty")
        return self
