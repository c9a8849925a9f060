"""The tokens that a loss chooses once a mini-batch, over all ranks: Clip-Cov, KL-Cov, those of highest entropy."""

from __future__ import annotations

import torch

from asyncrl.algorithms.losses.policy import LossTokens, select_tokens
from asyncrl.algorithms.segments import Segments
from asyncrl.learner.experience import Experience
from asyncrl.learner.stages import StageContext


def select(experience: Experience, context: StageContext) -> None:
    """selected [N]: of each mini-batch by its tokens on all ranks, before its first step."""
    config, columns = context.config.loss, experience.columns
    if not config.selects_tokens:
        return
    assert columns.learner_logprobs is not None
    assert columns.proximal_logprobs is not None
    assert columns.advantages is not None
    assert columns.entropy is not None
    selected = torch.zeros_like(columns.advantages, dtype=torch.bool)
    for number, minibatch in enumerate(experience.minibatches):
        own = slice(minibatch[0].tokens.start, minibatch[-1].tokens.stop)
        mine = torch.stack(
            [
                columns.learner_logprobs[own],
                columns.proximal_logprobs[own],
                columns.rollout_logprobs[own],
                columns.advantages[own],
                columns.entropy[own],
            ]
        )
        gathered, first = context.models.gather_columns(mine)
        learner, proximal, rollout, advantages, entropy = gathered
        tokens = LossTokens(
            learner_logprobs=learner,
            proximal_logprobs=proximal,
            advantages=advantages,
            segments=Segments(torch.zeros(len(learner), dtype=torch.int64, device=learner.device), 1),
            rollout_logprobs=rollout,
            entropy=entropy,
        )
        generator = torch.Generator().manual_seed(experience.index * 1_000_003 + number)
        chosen = select_tokens(config, tokens, generator=generator)
        assert chosen is not None
        selected[own] = chosen[first : first + mine.shape[1]]
    experience.selected = selected
