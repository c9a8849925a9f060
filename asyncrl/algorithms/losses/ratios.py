"""Importance ratios between the policy that trains and the one that the loss compares it with.

A ratio is exp(learner - anchor). The anchor is the proximal policy, or the rollout policy itself where there is no
proximal one ("bypass"): a loss does not ask which. Every ratio here has one value a token [N] and carries the gradient.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from asyncrl.algorithms.segments import Segments

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8. Larger log ratios are cut to it before exp, so that no finite input gives inf or, through
inf * 0, NaN. A NaN stays NaN: the gradient norm then refuses the step."""

RatioLevel = Literal["token", "sequence", "sequence_token", "sequence_sum"]


def bounded_exp(log_ratio: Tensor, limit: float | None = MAX_LOG_RATIO) -> Tensor:
    """exp of a log ratio cut to [-limit, limit], `None`: not cut; NaN stays NaN. Where it cuts, no gradient flows."""
    return (log_ratio if limit is None else log_ratio.clamp(-limit, limit)).exp()


def importance_ratio(
    learner_logprobs: Tensor,
    anchor_logprobs: Tensor,
    segments: Segments,
    *,
    level: RatioLevel = "token",
    max_log_ratio: float | None = MAX_LOG_RATIO,
) -> Tensor:
    """[N] log-probs -> ratio [N].

    token           exp(l_t), l_t = learner_t - anchor_t. PPO: arXiv:1707.06347.
    sequence        exp(mean of l over the trajectory), the same at each of its tokens; the gradient flows through the
                    mean. GSPO: arXiv:2507.18071.
    sequence_token  the same value, but each token passes the gradient of its own log-prob only: GSPO-token, in
                    the same paper. With one advantage a trajectory both give the same gradient.
    sequence_sum    exp(sum of l over the trajectory): the likelihood ratio of the whole completion (RLOO:
                    arXiv:2402.14740).

    Without tokens: an empty tensor.
    """
    log_ratio = learner_logprobs - anchor_logprobs
    if level == "sequence":
        log_ratio = segments.spread(segments.mean(log_ratio))
    elif level == "sequence_token":
        mean = segments.spread(segments.mean(log_ratio.detach()))
        log_ratio = learner_logprobs - learner_logprobs.detach() + mean
    elif level == "sequence_sum":
        log_ratio = segments.spread(segments.sum(log_ratio))
    return bounded_exp(log_ratio, max_log_ratio)
