"""What the entropy of the learner's distribution at each token is used for besides a bonus."""

from __future__ import annotations

import torch
from torch import Tensor


def top_entropy_tokens(entropy: Tensor, *, share: float) -> Tensor:
    """entropy [N] -> [N] bool: the tokens at or above the (1 - share) quantile: the forks of a text (arXiv:2506.01939).

    The quantile is over the tokens given: give those of the whole mini-batch (all ranks'), once, before its first
    microbatch. Multiply the policy loss with it; the token counts of the aggregation stay.
    """
    if len(entropy) == 0:
        return torch.zeros_like(entropy, dtype=torch.bool)
    return entropy >= torch.quantile(entropy, 1.0 - share)


def sampled_entropy_term(learner_logprobs: Tensor) -> Tensor:
    """-p log p of the sampled token [N], p = exp(log p): Megatron-RL's stand-in for the entropy, with its gradient."""
    return -learner_logprobs.exp() * learner_logprobs
