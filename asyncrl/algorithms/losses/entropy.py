"""What the entropy of the learner's distribution at each token is used for besides a bonus."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDING = 1e-6
"""Of a place among the sorted values: more than the product's error below 2^32 values."""


def top_entropy_tokens(entropy: Tensor, *, share: float) -> Tensor:
    """entropy [N] -> [N] bool: the tokens at or above the (1 - share) quantile: the forks of a text (arXiv:2506.01939).

    The quantile is over the tokens given: give those of the whole mini-batch (all ranks'), once, before its first
    microbatch. Multiply the policy loss with it; the token counts of the aggregation stay.
    """
    if len(entropy) == 0:
        return torch.zeros_like(entropy, dtype=torch.bool)
    # torch.quantile refuses more than 2^24 values. What lies at or above a quantile between two neighbours lies at or
    # above the upper one: no need to interpolate.
    place = math.ceil((1.0 - share) * (len(entropy) - 1) - ROUNDING)
    return entropy >= entropy.kthvalue(place + 1).values


def sampled_entropy_term(learner_logprobs: Tensor) -> Tensor:
    """-p log p of the sampled token [N], p = exp(log p): Megatron-RL's stand-in for the entropy, with its gradient."""
    return -learner_logprobs.exp() * learner_logprobs
