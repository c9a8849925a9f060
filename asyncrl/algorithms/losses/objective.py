"""The loss of a mini-batch, part by part: policy loss, KL, entropy bonus, cross entropy. Supervised tokens, which have
forward passes of their own, are a term apart (`ptx_term`).

Each part is a sum over this microbatch's tokens divided by a count of the whole mini-batch: add the results of all
microbatches and ranks. Nothing here is a mean of means.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.losses.aggregation import Counts, aggregate
from asyncrl.algorithms.losses.entropy import sampled_entropy_term
from asyncrl.algorithms.losses.kl import kl_estimate
from asyncrl.algorithms.losses.policy import LossTokens, logprobs_of, needed, policy_loss
from asyncrl.algorithms.losses.reinforce import negative_log_likelihood
from asyncrl.config.losses import AggregationConfig, EntropyConfig, KlConfig, LossConfig, PtxConfig


@dataclass(slots=True, frozen=True)
class LossCounts:
    """Of the whole mini-batch, one for each part."""

    trained: Counts
    """For the policy loss."""
    kl: Counts | None = None
    """None: as for the policy loss. Another where tokens are left out of one and not of the other."""
    entropy: Counts | None = None
    """None: as for the policy loss."""
    positive_tokens: float = 0.0


@dataclass(slots=True, frozen=True)
class Objective:
    loss: Tensor
    """Scalar, with gradient: this microbatch's share of the mini-batch's loss."""
    parts: dict[str, Tensor]
    """Its summands by name (policy, kl, entropy, positive), coefficients included; detached scalars."""
    diagnostics: dict[str, Tensor]
    """Metric -> [N], detached."""
    kl: Tensor | None = None
    """The summand `kl` without its coefficient, which may be 0."""


def objective(config: LossConfig, tokens: LossTokens, counts: LossCounts) -> Objective:
    """The keys of parts and diagnostics depend on the config only, also for a microbatch without tokens."""
    policy = policy_loss(config.policy, tokens)
    diagnostics = {
        **policy.diagnostics,
        "ppo_kl": tokens.proximal_logprobs - tokens.learner_logprobs.detach(),
    }
    loss = policy.loss
    if tokens.token_weights is not None:
        loss = loss * tokens.token_weights
    if config.top_entropy_share is not None:
        loss = loss * needed(tokens.selected, "selected")
    parts = {"policy": _aggregate(loss, tokens, counts.trained, config.aggregation)}
    kl_share = None
    if config.kl is not None:
        kl = kl_term(config.kl, tokens)
        diagnostics["kl"] = kl.detach()
        kl_share = _aggregate(kl, tokens, counts.kl or counts.trained, config.aggregation)
        parts["kl"] = config.kl.coef * kl_share
    if config.entropy.coef != 0:
        entropy = entropy_term(config.entropy, tokens)
        share = _aggregate(entropy, tokens, counts.entropy or counts.trained, config.aggregation)
        parts["entropy"] = -config.entropy.coef * share
    if config.ptx.positive_coef != 0:
        nll = negative_log_likelihood(tokens.learner_logprobs[needed(tokens.positive, "positive")])
        parts["positive"] = config.ptx.positive_coef * nll.sum() / max(counts.positive_tokens, 1.0)
    total = torch.stack(list(parts.values())).sum()
    return Objective(
        total,
        {name: part.detach() for name, part in parts.items()},
        diagnostics,
        kl=None if kl_share is None else kl_share.detach(),
    )


def ptx_term(config: PtxConfig, logprobs: Tensor, num_tokens: float) -> Tensor:
    """The share of some supervised tokens [N] in coef * the mean of -log pi over all `num_tokens` of their step.

    `logprobs`: of the model's own distribution, whose temperature is 1.
    """
    return config.coef * negative_log_likelihood(logprobs).sum() / num_tokens


def kl_term(config: KlConfig, tokens: LossTokens) -> Tensor:
    """The KL estimate of each token [N], with gradient, without its coefficient."""
    learner = tokens.learner_logprobs
    weight = None
    if config.weight == "score_function":
        weight = (learner - learner.detach()).exp()
    elif config.weight == "ratio":
        weight = (learner - tokens.proximal_logprobs).exp()
    elif config.weight == "rollout_ratio":
        weight = (learner - logprobs_of("rollout", tokens)).exp()
    return kl_estimate(
        learner,
        logprobs_of(config.reference, tokens),
        estimator=config.estimator,
        clamp_log_ratio=config.clamp_log_ratio,
        clamp_estimate=config.clamp_estimate,
        gradient_of_k2=config.gradient_of_k2,
        weight=weight,
    )


def entropy_term(config: EntropyConfig, tokens: LossTokens) -> Tensor:
    """The entropy at each token [N], with gradient, without its coefficient."""
    if config.estimate == "sampled":
        return sampled_entropy_term(tokens.learner_logprobs)
    return needed(tokens.entropy, "entropy")


def _aggregate(values: Tensor, tokens: LossTokens, counts: Counts, aggregation: AggregationConfig) -> Tensor:
    return aggregate(
        values,
        tokens.segments,
        mode=aggregation.mode,
        length=aggregation.length,
        divide_by=aggregation.divide_by,
        at_least=aggregation.at_least,
        counts=counts,
        group_index=tokens.group_index,
    )
