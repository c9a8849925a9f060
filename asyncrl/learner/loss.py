"""The loss of one microbatch: off-policy correction, then the objective, then what is reported of both."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.correction import Correction, Policies, correct, log_linear_proximal
from asyncrl.algorithms.losses import Counts, bounded_exp
from asyncrl.algorithms.losses.objective import LossCounts, Objective, objective
from asyncrl.algorithms.losses.policy import LossTokens
from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.losses import LossConfig
from asyncrl.learner.experience import Experience, Microbatch
from asyncrl.learner.model import PolicyOutput
from asyncrl.learner.totals import Totals


@dataclass(slots=True, frozen=True)
class StepLoss:
    """What one microbatch adds to its step."""

    loss: Tensor
    """Scalar, with gradient: divided by the mini-batch's count, unless that is known only afterwards."""
    counted: Counts
    """Of this microbatch: what the correction lets into the denominator."""
    kl_sums: Tensor
    """[2] float64: the sum of proximal - learner log-probs (k1), and the number of tokens."""


def policy_loss(
    config: AlgorithmConfig,
    experience: Experience,
    microbatch: Microbatch,
    output: PolicyOutput,
    counts: Counts,
    totals: Totals,
    *,
    max_staleness: int,
    positive_tokens: float = 0.0,
) -> StepLoss:
    """Of the trained tokens of a microbatch. `counts`: of its mini-batch over all ranks; where the denominator is known
    only when all of it was seen (`scales_afterwards`) nothing is divided yet. `positive_tokens`: of its mini-batch,
    those of trajectories with a reward above 0."""
    tokens, correction = loss_tokens(config, experience, microbatch, output)
    loss_config = undivided(config.loss) if scales_afterwards(config) else config.loss
    found = objective(loss_config, tokens, LossCounts(counts, positive_tokens=positive_tokens))
    _report(experience, microbatch, tokens, correction, found, totals, max_staleness)
    log_ratio = (tokens.proximal_logprobs - tokens.learner_logprobs.detach()).double()
    kl_sums = torch.stack([log_ratio.sum(), log_ratio.new_tensor(float(len(log_ratio)))])
    return StepLoss(found.loss, Counts.of(tokens.segments, tokens.group_index), kl_sums)


def undivided(config: LossConfig) -> LossConfig:
    """The loss as a sum, whatever its denominator is."""
    return config.model_copy(
        update={"aggregation": config.aggregation.model_copy(update={"divide_by": "one"})}
    )


def scales_afterwards(config: AlgorithmConfig) -> bool:
    """Whether rejected tokens leave the denominator: then it is known when the whole mini-batch was corrected."""
    return bool(config.correction.rejections) and config.correction.denominator == "kept"


def loss_tokens(
    config: AlgorithmConfig, experience: Experience, microbatch: Microbatch, output: PolicyOutput
) -> tuple[LossTokens, Correction]:
    """The microbatch's columns as the objective reads them; rejected tokens are gone where they do not count."""
    columns, part = experience.columns, microbatch.tokens
    segments = experience.segments_of(microbatch)
    learner = output.logprobs
    rollout = columns.rollout_logprobs[part]
    if config.correction.proximal == "log_linear":
        proximal = log_linear_proximal(
            learner, rollout, columns.policy_versions[part], proximal_version=experience.index
        )
    else:
        assert columns.proximal_logprobs is not None
        proximal = columns.proximal_logprobs[part]
    assert columns.advantages is not None
    advantages = columns.advantages[part]
    if experience.correction is not None:
        correction = experience.correction.part(part)
    else:
        correction = correct(
            Policies(learner.detach(), proximal, rollout), segments, config.correction, advantages=advantages
        )
    first = microbatch.trajectories
    tokens = LossTokens(
        learner_logprobs=learner,
        proximal_logprobs=proximal,
        advantages=advantages,
        segments=segments,
        group_index=experience.group_index[first],
        rollout_logprobs=rollout,
        ref_logprobs=None if columns.ref_logprobs is None else columns.ref_logprobs[part],
        entropy=output.entropy,
        token_weights=correction.weights,
        selected=None if experience.selected is None else experience.selected[part],
        positive=segments.spread(experience.batch.rewards[experience.rows[first]] > 0),
    )
    if scales_afterwards(config):
        tokens = tokens.only(correction.counted)
    return tokens, correction


def _report(
    experience: Experience,
    microbatch: Microbatch,
    tokens: LossTokens,
    correction: Correction,
    found: Objective,
    totals: Totals,
    max_staleness: int,
) -> None:
    shares = found.parts if found.kl is None else found.parts | {"kl": found.kl}  # verl's has no coefficient
    for name, share in shares.items():
        totals.add_share(PARTS.get(name, f"actor/{name}_loss"), share)
    for name, of_token in found.diagnostics.items():
        totals.add_mean(f"actor/{name}", of_token)
    assert tokens.entropy is not None
    totals.add_mean("actor/entropy", tokens.entropy)
    if experience.correction is None:
        staleness = experience.index - experience.columns.policy_versions[microbatch.tokens]
        add_by_staleness(correction, staleness, max_staleness)
        totals.add_diagnostics(correction.diagnostics)


def add_by_staleness(correction: Correction, staleness: Tensor, max_staleness: int) -> None:
    """Splits what the correction measured of each token by the token's staleness [N]; the last bucket has the rest."""
    bucket = staleness.clamp(0, max_staleness)
    for age in range(max_staleness + 1):
        of_age = bucket == age
        log_ratio = correction.log_ratio[of_age].double()
        ratio = bounded_exp(log_ratio)
        for name, values in {
            "mismatch/k1": -log_ratio,
            "mismatch/k3": log_ratio.expm1() - log_ratio,
            "mismatch/ratio": ratio,
            "correction/rejected_share": ~correction.kept[of_age],
        }.items():
            correction.diagnostics.add_summary(f"{name}/staleness_{age}", values)


PARTS = {"policy": "actor/pg_loss"}
"""Names of verl; the other parts are actor/<part>_loss."""
