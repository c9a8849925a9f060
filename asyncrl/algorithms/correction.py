"""Off-policy correction: importance weights between the policy that sampled and the one that trains."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.losses import bounded_exp
from asyncrl.config import NoCorrection, TruncatedImportanceSampling


def importance_weights(
    proximal_logprobs: Tensor, rollout_logprobs: Tensor, config: TruncatedImportanceSampling | NoCorrection
) -> tuple[Tensor, Tensor]:
    """(weights [N], truncated [N] bool) from log-probs [N]; no gradient flows through either.

    `tis`: min(exp(proximal - rollout), cap) for each token. `none`: every weight is 1.
    """
    ratio = bounded_exp((proximal_logprobs - rollout_logprobs).detach())
    if isinstance(config, NoCorrection):
        return torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool)
    return ratio.clamp(max=config.cap), ratio > config.cap
