"""The Recipe seam: what an algorithm computes from rewards and log-probs. Pure torch functions, no model.

The learner asks a recipe for the advantages of the whole batch, then for the loss of each microbatch. A
recipe returns sums over tokens, never means: the learner divides by the mini-batch's global number of trained
tokens, so the result depends neither on microbatches nor on ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(slots=True, frozen=True)
class TokenBatch:
    """The N trained tokens of one microbatch, float32, [N] each. N may be 0."""

    learner_logprobs: Tensor
    """Under the weights being trained; carries the gradient."""
    proximal_logprobs: Tensor
    """Under the policy that the ratio compares with: the learner before the batch's first step."""
    rollout_logprobs: Tensor
    """Under the distribution that sampled the token."""
    advantages: Tensor
    entropy: Tensor
    """Of the learner's distribution at each token; no gradient."""


@dataclass(slots=True, frozen=True)
class LossSums:
    """What a loss returns for one microbatch. The keys are the same for every one, also an empty one."""

    loss: Tensor
    """Scalar: the sum over tokens, with gradient."""
    sums: dict[str, Tensor]
    """Metric -> scalar sum over tokens; reported divided by the number of trained tokens of all steps."""
    maxima: dict[str, Tensor]
    """Metric -> scalar maximum over tokens; 0 without tokens."""


class Recipe(Protocol):
    """An algorithm. Add one: a file beside this one, a config class, and a name in registry.py."""

    def advantages(self, rewards: Tensor, group_index: Tensor) -> Tensor:
        """rewards [R] float64, NaN where a trajectory has none; group_index [R] int64 from 0 -> [R] float32.

        The whole batch at once. A trajectory without a reward gets 0.
        """
        ...

    def loss(self, batch: TokenBatch) -> LossSums: ...
