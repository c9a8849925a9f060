"""From the config's `policy.type` to the loss of each token, and which tokens a mini-batch selects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asyncrl.algorithms.losses.cispo import cispo_loss
from asyncrl.algorithms.losses.covariance import (
    clip_cov_loss,
    clip_cov_selection,
    covariances,
    kl_cov_loss,
    kl_cov_selection,
)
from asyncrl.algorithms.losses.dppo import masked_ratio_loss, near_in_probability, within_trust_region
from asyncrl.algorithms.losses.entropy import top_entropy_tokens
from asyncrl.algorithms.losses.ppo import clipped_surrogate
from asyncrl.algorithms.losses.ratios import importance_ratio
from asyncrl.algorithms.losses.reinforce import (
    dro_loss,
    importance_weighted_loss,
    negative_log_likelihood,
    reinforce_loss,
)
from asyncrl.algorithms.losses.sapo import soft_gated_loss
from asyncrl.algorithms.losses.sequence import gamma_weights, geometric_mean_surrogate, vespo_loss
from asyncrl.algorithms.losses.token_loss import TokenLoss
from asyncrl.algorithms.segments import Segments
from asyncrl.algorithms.user_functions import call_user_function, token_values
from asyncrl.config.losses import (
    CispoLoss,
    ClipCovLoss,
    CrossEntropyLoss,
    CustomLoss,
    DppoLoss,
    DroLoss,
    GmpoLoss,
    ImportanceWeightedLoss,
    IpoLoss,
    KlCovLoss,
    LossConfig,
    PolicyLoss,
    PpoLoss,
    RatioOptions,
    ReinforceLoss,
    SapoLoss,
    VespoLoss,
)
from asyncrl.errors import LearnerError


@dataclass(slots=True, frozen=True)
class LossTokens:
    """The N trained tokens of R whole trajectories: one microbatch. All [N] unless said otherwise."""

    learner_logprobs: Tensor
    """Carries the gradient."""
    proximal_logprobs: Tensor
    advantages: Tensor
    segments: Segments
    group_index: Tensor | None = None
    """[R] int64; for `prompt-mean`."""
    rollout_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    """With a gradient where there is an entropy bonus."""
    token_weights: Tensor | None = None
    """Off-policy correction: multiplies the policy loss alone, 0 where a token is rejected. No gradient."""
    selected: Tensor | None = None
    """bool; what select_tokens decided for the mini-batch. None: every token keeps its loss."""
    positive: Tensor | None = None
    """bool; tokens of the trajectories that count as good answers, for `ptx.positive_coef`."""

    def only(self, kept: Tensor) -> LossTokens:
        """The tokens where `kept` [N] is true; trajectories that lose all of theirs stay, without tokens."""
        segments = Segments(self.segments.index[kept], self.segments.num_trajectories)
        return replace(self._mapped(lambda column: column[kept]), segments=segments)

    def copied(self) -> LossTokens:
        """With columns of its own: who writes into them changes no later step."""
        return replace(self._mapped(Tensor.clone), learner_logprobs=self.learner_logprobs)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> LossTokens:
        """With `change` done to each column [N]."""
        columns = {
            name: None if (values := getattr(self, name)) is None else change(values)
            for name in (
                "learner_logprobs",
                "proximal_logprobs",
                "advantages",
                "rollout_logprobs",
                "ref_logprobs",
                "entropy",
                "token_weights",
                "selected",
                "positive",
            )
        }
        return replace(self, **columns)


def policy_loss(config: PolicyLoss, tokens: LossTokens) -> TokenLoss:
    """The policy loss of each token [N], before weights and aggregation."""
    learner, advantages, segments = tokens.learner_logprobs, tokens.advantages, tokens.segments
    if isinstance(config, CustomLoss):
        return custom_loss(config, tokens)
    if isinstance(config, GmpoLoss):
        return geometric_mean_surrogate(
            learner,
            tokens.proximal_logprobs,
            advantages,
            segments,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
        )
    if isinstance(config, ReinforceLoss):
        return reinforce_loss(learner, advantages)
    if isinstance(config, CrossEntropyLoss):
        return TokenLoss(negative_log_likelihood(learner), {})
    if isinstance(config, DroLoss):
        return dro_loss(learner, tokens.proximal_logprobs, advantages, beta=config.beta)
    if isinstance(config, VespoLoss):
        weights = gamma_weights(
            learner - tokens.proximal_logprobs,
            advantages,
            segments,
            k_positive=config.k_positive,
            lambda_positive=config.lambda_positive,
            k_negative=config.k_negative,
            lambda_negative=config.lambda_negative,
        )
        return vespo_loss(learner, advantages, weights)
    return _ratio_loss(config, tokens)


def custom_loss(config: CustomLoss, tokens: LossTokens) -> TokenLoss:
    """Of the user's own function. Raises LearnerError for what is no loss of each token.

    It is not called for a microbatch without tokens, which only keeps a rank in step with the others.
    """
    if not len(tokens.learner_logprobs):
        return TokenLoss(tokens.learner_logprobs, {})
    key, spec = "algorithm.loss.policy.function", config.function
    should = (
        f"give one value a token, {[*tokens.learner_logprobs.shape]}, computed from tokens.learner_logprobs, which "
        "carry the gradient"
    )
    given = call_user_function(key, spec, tokens.copied(), **config.options)
    loss = token_values(key, spec, given, tokens.learner_logprobs, should=should)
    if not loss.requires_grad:
        raise LearnerError(f"{key} {spec!r} gave a tensor {[*loss.shape]} without a gradient; {should}")
    return TokenLoss(loss, {})


def _ratio_loss(config: RatioOptions, tokens: LossTokens) -> TokenLoss:
    learner, advantages, segments = tokens.learner_logprobs, tokens.advantages, tokens.segments
    if config.mean_advantages:
        advantages = segments.spread(segments.mean(advantages))
    anchor = logprobs_of(config.anchor, tokens)
    ratio = importance_ratio(
        learner, anchor, segments, level=config.ratio, max_log_ratio=config.max_log_ratio
    )
    if isinstance(config, CispoLoss):
        return cispo_loss(
            ratio,
            learner,
            advantages,
            ratio_min=config.ratio_min,
            ratio_max=config.ratio_max,
            outside=config.outside,
        )
    if isinstance(config, SapoLoss):
        return soft_gated_loss(
            ratio, advantages, tau_positive=config.tau_positive, tau_negative=config.tau_negative
        )
    if isinstance(config, DppoLoss):
        keep = within_trust_region(
            learner,
            anchor,
            advantages,
            divergence=config.divergence,
            delta_low=config.delta_low,
            delta_high=config.delta_high,
        )
        return masked_ratio_loss(
            ratio,
            learner,
            advantages,
            keep,
            max_ratio=config.max_ratio,
            score_function=config.score_function,
        )
    if isinstance(config, IpoLoss):
        keep = near_in_probability(learner, anchor, threshold=config.threshold)
        return masked_ratio_loss(ratio, learner, advantages, keep)
    if isinstance(config, KlCovLoss):
        selected = needed(tokens.selected, "selected")
        return kl_cov_loss(ratio, learner - anchor, advantages, selected, coef=config.coef)
    if isinstance(config, ImportanceWeightedLoss):
        return importance_weighted_loss(ratio, advantages)
    assert isinstance(config, PpoLoss)
    token_loss = clipped_surrogate(
        ratio,
        advantages,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        max_ratio=config.max_ratio,
    )
    if isinstance(config, ClipCovLoss):
        return clip_cov_loss(token_loss, needed(tokens.selected, "selected"))
    return token_loss


def select_tokens(
    config: LossConfig, tokens: LossTokens, *, generator: torch.Generator | None = None
) -> Tensor | None:
    """`tokens` of the whole mini-batch, all ranks', before its first step -> [N] bool for LossTokens.selected.

    None where the config selects nothing: then no such pass is needed. clip_cov and kl_cov: the tokens that are held
    back; top_entropy_share: the tokens that keep their loss.
    """
    policy = config.policy
    if isinstance(policy, KlCovLoss):
        return kl_cov_selection(covariances(tokens.learner_logprobs, tokens.advantages), share=policy.share)
    if isinstance(policy, ClipCovLoss):
        anchor = logprobs_of(policy.anchor, tokens)
        ratio = importance_ratio(
            tokens.learner_logprobs.detach(), anchor, tokens.segments, max_log_ratio=policy.max_log_ratio
        )
        clipped = clipped_surrogate(
            ratio, tokens.advantages, clip_low=policy.clip_low, clip_high=policy.clip_high
        ).diagnostics["pg_clipfrac"]
        return clip_cov_selection(
            covariances(tokens.learner_logprobs, tokens.advantages),
            clipped,
            share=policy.share,
            lowest=policy.lowest,
            highest=policy.highest,
            generator=generator,
        )
    if config.top_entropy_share is not None:
        return top_entropy_tokens(needed(tokens.entropy, "entropy"), share=config.top_entropy_share)
    return None


def logprobs_of(policy: str, tokens: LossTokens) -> Tensor:
    """[N], by the name that a config gives the policy; of the learner without its gradient."""
    if policy == "proximal":
        return tokens.proximal_logprobs
    if policy == "learner":
        return tokens.learner_logprobs.detach()
    name = f"{policy}_logprobs"
    return needed(getattr(tokens, name), name)


def needed(values: Tensor | None, name: str) -> Tensor:
    """Raises ValueError where the batch lacks what the loss reads."""
    if values is None:
        raise ValueError(f"this loss reads {name}, and the batch has none")
    return values
