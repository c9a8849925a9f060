"""Estimates of KL(learner || reference) from the log-probs of sampled tokens: for the loss, or for the reward."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3", "abs"]


def kl_estimate(
    learner_logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    estimator: KlEstimator,
    clamp_log_ratio: float | None = None,
    clamp_estimate: float | None = None,
    gradient_of_k2: bool = False,
    weight: Tensor | None = None,
) -> Tensor:
    """[N] log-probs -> [N]. With d = learner - reference (joschu.net/blog/kl-approx):

    k1   d                    unbiased; may be negative; as a loss its gradient has mean 0
    k2   d^2 / 2              biased; its gradient is that of the KL on policy
    k3   exp(-d) - 1 + d      unbiased, never negative; explodes where d is far below 0
    abs  |d|

    clamp_log_ratio, clamp_estimate: cut d to [-c, c] before, and the result after; where a cut is made no gradient
    flows. verl and SkyRL cut k3 at 20 and 10; NeMo any estimator so; OpenRLHF any at 10 after; TRL nothing.
    gradient_of_k2: the value of the estimator with the gradient of d^2 / 2 (verl's `k3+`).
    weight: [N], multiplies the estimate, with whatever gradient it carries: a ratio to the policy that sampled makes
    the estimate unbiased off policy; exp(learner - stop_gradient(learner)) adds the score-function term.
    """
    log_ratio = learner_logprobs - ref_logprobs
    d = log_ratio if clamp_log_ratio is None else log_ratio.clamp(-clamp_log_ratio, clamp_log_ratio)
    if estimator == "k1":
        estimate = d
    elif estimator == "k2":
        estimate = d.square() / 2
    elif estimator == "k3":
        estimate = (-d).exp() - 1 + d
    else:
        estimate = d.abs()
    if weight is not None:
        estimate = estimate * weight
    if clamp_estimate is not None:
        estimate = estimate.clamp(-clamp_estimate, clamp_estimate)
    if gradient_of_k2:
        k2 = log_ratio.square() / 2
        estimate = estimate.detach() + k2 - k2.detach()
    return estimate
