"""The tokens that a loss chooses once a mini-batch, over all ranks: Clip-Cov, KL-Cov, those of highest entropy."""

from __future__ import annotations

import torch

from asyncrl.algorithms.losses.policy import LossTokens, select_tokens
from asyncrl.algorithms.segments import Segments
from asyncrl.learner.experience import Experience
from asyncrl.learner.stages import StageContext


def select(experience: Experience, context: StageContext) -> None:
    """selected [N]: of each mini-batch by its tokens on all ranks, before its first step.

    Every rank sees all tokens in the batch's order and makes the same choice, whatever the number of ranks.
    """
    config, columns = context.config.loss, experience.columns
    if not config.selects_tokens:
        return
    assert columns.learner_logprobs is not None
    assert columns.proximal_logprobs is not None
    assert columns.advantages is not None
    assert columns.entropy is not None
    minibatch = torch.empty_like(columns.entropy)
    for number, microbatches in enumerate(experience.minibatches):
        minibatch[microbatches[0].tokens.start : microbatches[-1].tokens.stop] = number
    mine = torch.stack(
        [
            columns.learner_logprobs,
            columns.proximal_logprobs,
            columns.rollout_logprobs,
            columns.advantages,
            columns.entropy,
            minibatch,
        ]
    )
    places = experience.places
    num_tokens = int(experience.batch.num_trained_tokens.sum())
    whole = context.models.gather_columns(mine, places, num_tokens)
    chosen = torch.zeros(num_tokens, dtype=torch.bool, device=places.device)
    for number in range(len(experience.minibatches)):
        among = whole[5] == number
        learner, proximal, rollout, advantages, entropy = whole[:5, among]
        tokens = LossTokens(
            learner_logprobs=learner,
            proximal_logprobs=proximal,
            advantages=advantages,
            segments=Segments(torch.zeros_like(learner, dtype=torch.int64), 1),
            rollout_logprobs=rollout,
            entropy=entropy,
        )
        generator = torch.Generator().manual_seed(experience.index * 1_000_003 + number)
        found = select_tokens(config, tokens, generator=generator)
        assert found is not None
        chosen[among] = found
    experience.selected = chosen[places]
