"""Log-probabilities and entropies from hidden states, without ever holding all logits.

The policy model calls it for the trained tokens of a microbatch, inside FSDP's root forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax((hidden @ weight.T + bias) / temperature) at `target`, and the entropy of that distribution.

    hidden [N, H], weight [V, H], bias [V], target [N] -> (log-probs [N], entropies [N]), in float32 (float64
    for float64 inputs). At most `chunk_tokens` rows of logits, and an array like them, exist at once, forward and
    backward: the backward pass computes them again. Log-probs carry gradients to hidden, weight and bias; the entropy
    carries its own only with `entropy_gradient`, for an entropy term in the loss.
    """
    logprobs, entropy = _LinearLogprobs.apply(
        hidden, weight, bias, target, temperature, chunk_tokens, entropy_gradient
    )
    return logprobs, entropy


@torch.no_grad()
def sum_squared_probabilities(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, temperature: float, chunk_tokens: int
) -> Tensor:
    """Sum over the vocabulary of the squared probability at each of N states, [N]; shapes as for linear_logprobs."""
    pieces = [
        torch.softmax(_logits(hidden[rows], weight, bias, temperature), 1).square_().sum(1)
        for rows in _chunks(len(hidden), chunk_tokens)
    ]
    return torch.cat(pieces) if pieces else hidden.new_empty(0, dtype=_precise(hidden.dtype))


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        temperature: float,
        chunk_tokens: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature = temperature
        ctx.chunk_tokens = chunk_tokens
        ctx.entropy_gradient = entropy_gradient
        logprobs = hidden.new_empty(len(hidden), dtype=_precise(hidden.dtype))
        entropy = torch.empty_like(logprobs)
        for rows in _chunks(len(hidden), chunk_tokens):
            log_softmax = torch.log_softmax(_logits(hidden[rows], weight, bias, temperature), 1)
            logprobs[rows] = log_softmax.gather(1, target[rows, None]).squeeze(1)
            entropy[rows] = -torch.bmm(log_softmax.exp()[:, None, :], log_softmax[:, :, None]).flatten()
        if entropy_gradient:
            ctx.save_for_backward(hidden, weight, bias, target, entropy)
        else:
            ctx.save_for_backward(hidden, weight, bias, target)
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad, grad_entropy = grads
        hidden, weight, bias, target, *saved_entropy = ctx.saved_tensors
        precise = _precise(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=precise)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=precise)
        for rows in _chunks(len(hidden), ctx.chunk_tokens):
            # d logprob[target] / d logits = (one_hot(target) - softmax) / temperature
            scale = (grad[rows] / ctx.temperature)[:, None]
            logits = _logits(hidden[rows], weight, bias, ctx.temperature)
            if ctx.entropy_gradient:
                log_softmax = torch.log_softmax(logits, 1)
                del logits
                # d entropy / d logits = -softmax * (log softmax + entropy) / temperature
                entropy_scale = (grad_entropy[rows] / ctx.temperature)[:, None]
                softmax = log_softmax.exp()
                grad_logits = log_softmax.add_(saved_entropy[0][rows, None]).mul_(-entropy_scale)
                grad_logits.sub_(scale).mul_(softmax)
                del softmax
            else:
                grad_logits = torch.softmax(logits, 1).mul_(-scale)
                del logits
            grad_logits.scatter_add_(1, target[rows, None], scale)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(weight.dtype)
            grad_hidden[rows] = grad_logits @ weight
            if weight.dtype == precise:
                grad_weight.addmm_(grad_logits.T, hidden[rows])
            else:
                grad_weight += grad_logits.T @ hidden[rows]
        return (
            grad_hidden,
            grad_weight.to(weight.dtype),
            None if bias is None or grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """[n, V] in a precise dtype."""
    logits = torch.nn.functional.linear(hidden, weight, bias).to(_precise(hidden.dtype))
    if temperature != 1.0:
        logits /= temperature
    return logits


def _chunks(num_rows: int, chunk_rows: int) -> list[slice]:
    return [slice(start, min(start + chunk_rows, num_rows)) for start in range(0, num_rows, chunk_rows)]


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
