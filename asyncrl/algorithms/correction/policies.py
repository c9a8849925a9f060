"""The policies that off-policy correction tells apart, and the log-linear approximation of the proximal one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(slots=True, frozen=True)
class Policies:
    """Log-probs [N] of the same trained tokens. No function of this package carries a gradient to any of them."""

    learner: Tensor
    """Under the weights being trained."""
    proximal: Tensor
    """Under the policy that the loss's ratio compares with; equal to `rollout` in bypass mode."""
    rollout: Tensor
    """Under the distribution that sampled the token."""

    def pair(
        self, between: str, proximal: Literal["recompute", "bypass", "log_linear"]
    ) -> tuple[Tensor, Tensor]:
        """(new, old) log-probs [N] of a criterion's `between`, detached.

        The corrected policy is the proximal one, and the learner in bypass mode, where no policy lies between.
        """
        pairs = {
            "corrected_rollout": (self.learner if proximal == "bypass" else self.proximal, self.rollout),
            "learner_rollout": (self.learner, self.rollout),
            "learner_proximal": (self.learner, self.proximal),
        }
        new, old = pairs[between]
        return new.detach(), old.detach()


def log_linear_proximal(
    learner_logprobs: Tensor, rollout_logprobs: Tensor, token_versions: Tensor, *, proximal_version: int
) -> Tensor:
    """Log-probs [N] of the proximal policy, from the two that are known anyway; no gradient.

    learner_logprobs [N], rollout_logprobs [N], token_versions [N] int: the version that sampled each token.
    `proximal_version` v is the version that the batch trains, and the learner is on its way to v + 1. A token of
    version u gets rollout + a (learner - rollout) with a = (v - u) / (v + 1 - u): 0 for a token of the version
    itself, whose sampler was the proximal policy, and towards 1 the older it is. AReaL's `loglinear`. Instead of a
    forward pass it assumes that log-probs move evenly from version to version; engine mismatch stays in it.
    """
    age = (proximal_version - token_versions).to(rollout_logprobs.dtype)
    return torch.lerp(rollout_logprobs.detach(), learner_logprobs.detach(), age / (age + 1))
