"""Log-probs and entropies from logits: the identity is the output head, so hidden states are the logits.

Ours are taken around the largest logit; peers that subtract huge numbers in float32 lose digits to huge logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.learner.logprobs import linear_logprobs, sum_squared_probabilities
from tests.algorithms.goldens import Golden, LeftOut, assert_equal

SUBTRACTS_LOGSUMEXP = {("trl", "selective_log_softmax")} | {
    (peer, "logprobs_from_logits_v2") for peer in ("verl", "skyrl")
}
"""Peers' log-probs that are the logit minus logsumexp."""
LOGSUMEXP_MINUS_MEAN = {"verl", "roll", "prime_rl"}
"""Peers whose entropy is logsumexp - sum of p x logits, the difference of two huge numbers for huge logits."""


def replay(case: Golden) -> None:
    function = case.function.rpartition("::")[2]
    is_sum = function == "calculate_sum_pi_squared_from_logits"
    subtracts = (
        is_sum
        or (case.peer, function) in SUBTRACTS_LOGSUMEXP
        or ("entropy" in case.outputs and case.peer in LOGSUMEXP_MINUS_MEAN)
    )
    if subtracts and "/extreme/" in case.id and case.dtype == torch.float32:
        raise LeftOut("it loses digits to huge logits in float32")
    if is_sum:
        _sum_pi_squared(case)
        return
    logits = case.tensor("logits").requires_grad_()
    logprobs, entropy = _logprobs_and_entropy(case, logits, entropy_gradient="entropy" in case.outputs)
    if "log_probs" in case.outputs:
        assert_equal(case, "log_probs", logprobs, case.output("log_probs"))
        _check_gradient(case, logits, logprobs)
    elif "entropy" in case.outputs:
        assert_equal(case, "entropy", entropy, case.output("entropy").reshape(entropy.shape))
        _check_gradient(case, logits, entropy)
    else:  # golden_loss_aggregation.py is about aggregations; here they are torch's own
        rows = (entropy * case.mask).sum(1)
        found = {
            "token-mean": entropy[case.mask].mean(),
            "token-sum": rows.sum(),
            "seq-mean-token-sum": rows.mean(),
            "seq-mean-token-sum-norm": rows.mean() / entropy.shape[1],
        }[case.params["loss_agg_mode"]]
        expected = torch.tensor(case.outputs["entropy_loss"], dtype=case.dtype)
        assert_equal(case, "entropy_loss", found, expected)


def _logprobs_and_entropy(case: Golden, logits: Tensor, *, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """(B, T) each; a case without labels asks for the entropy alone."""
    vocabulary = logits.shape[-1]
    rows = logits.reshape(-1, vocabulary)
    labels = (
        case.tensor("labels", torch.int64).reshape(-1)
        if "labels" in case.inputs
        else torch.zeros(len(rows), dtype=torch.int64)
    )
    logprobs, entropy = linear_logprobs(
        rows,
        torch.eye(vocabulary, dtype=case.dtype),
        None,
        labels,
        temperature=case.params.get("temperature", 1.0),
        chunk_tokens=case.params.get("chunk_size", 1024),
        entropy_gradient=entropy_gradient,
    )
    return logprobs.reshape(logits.shape[:-1]), entropy.reshape(logits.shape[:-1])


def _sum_pi_squared(case: Golden) -> None:
    logits = case.tensor("logits")
    found = sum_squared_probabilities(
        logits.reshape(-1, logits.shape[-1]),
        torch.eye(logits.shape[-1], dtype=case.dtype),
        None,
        temperature=1.0,
        chunk_tokens=3,
    )
    expected = case.output("sum_pi_squared")
    assert_equal(case, "sum_pi_squared", found.reshape(expected.shape), expected)


def _check_gradient(case: Golden, logits: Tensor, values: Tensor) -> None:
    if case.outputs.get("grad_logits") is not None:
        values.sum().backward()
        assert logits.grad is not None
        assert_equal(case, "grad_logits", logits.grad, case.output("grad_logits"))
