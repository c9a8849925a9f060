"""linear_logprobs: values, gradients, and what it never holds."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl.learner.logprobs import linear_logprobs


def random_case(num_tokens, hidden_size, vocabulary, dtype=torch.float64):
    torch.manual_seed(3)
    hidden = torch.randn(num_tokens, hidden_size, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, dtype=dtype, requires_grad=True)
    bias = torch.randn(vocabulary, dtype=dtype, requires_grad=True)
    return hidden, weight, bias, torch.randint(0, vocabulary, (num_tokens,))


# Mutations caught: temperature left out of the backward pass; the chunk's rows off by one; dweight overwritten
# by the last chunk instead of summed.
@pytest.mark.parametrize("chunk_tokens", [1, 3, 5, 100])
@pytest.mark.parametrize("has_bias", [True, False])
def test_gradients_are_those_of_finite_differences(chunk_tokens, has_bias):
    hidden, weight, bias, target = random_case(5, 4, 6)

    def logprobs(hidden, weight, bias):
        return linear_logprobs(
            hidden, weight, bias if has_bias else None, target, temperature=0.6, chunk_tokens=chunk_tokens
        )[0]

    assert torch.autograd.gradcheck(logprobs, (hidden, weight, bias))


# Mutations caught: the entropy left out of its gradient's (log p + H); its temperature left out; a gradient of the
# log-probs alone, or of the entropy alone; the weight's gradient taken without the entropy's share.
@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
@pytest.mark.parametrize("has_bias", [True, False])
def test_entropy_gradients_are_those_of_finite_differences(chunk_tokens, has_bias):
    hidden, weight, bias, target = random_case(5, 4, 6)

    def both(hidden, weight, bias):
        return linear_logprobs(
            hidden,
            weight,
            bias if has_bias else None,
            target,
            temperature=0.6,
            chunk_tokens=chunk_tokens,
            entropy_gradient=True,
        )

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


def test_the_log_probs_gradient_does_not_depend_on_whether_the_entropy_has_one():
    found = []
    for entropy_gradient in (False, True):
        hidden, weight, bias, target = random_case(9, 4, 13)
        logprobs, entropy = linear_logprobs(
            hidden, weight, bias, target, temperature=0.6, chunk_tokens=4, entropy_gradient=entropy_gradient
        )
        assert entropy.requires_grad == entropy_gradient
        (logprobs * torch.arange(9)).sum().backward()
        found.append((logprobs, entropy.detach(), hidden.grad, weight.grad, bias.grad))
    for without, with_entropy in zip(*found, strict=True):
        torch.testing.assert_close(without, with_entropy, rtol=1e-12, atol=1e-12)


def test_entropy_of_huge_logits_is_exact_with_gradients():
    # Mutation caught: logits that are not taken around their maximum, whose float32 has steps of 0.0625 at 1e6: the
    # log-probs of two equal logits are then 0 or -0.6875, not -0.693147, and the entropy is off by as much.
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[1e6], [1e6], [-1e6]])
    logprobs, entropy = linear_logprobs(
        hidden, weight, None, torch.tensor([1]), temperature=1.0, chunk_tokens=8, entropy_gradient=True
    )
    assert float(entropy) == pytest.approx(0.693147, abs=1e-6)
    assert float(logprobs) == pytest.approx(-0.693147, abs=1e-6)


def test_values_equal_torch_for_each_chunk_size():
    hidden, weight, bias, target = random_case(9, 4, 13, torch.float32)
    distribution = torch.distributions.Categorical(logits=(hidden @ weight.T + bias).detach() / 0.6)
    for chunk_tokens in (1, 4, 9, 64):
        logprobs, entropy = linear_logprobs(
            hidden, weight, bias, target, temperature=0.6, chunk_tokens=chunk_tokens
        )
        torch.testing.assert_close(logprobs, distribution.log_prob(target), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(entropy, distribution.entropy(), rtol=1e-5, atol=1e-6)
        assert logprobs.requires_grad
        assert not entropy.requires_grad


def test_temperature_divides_logits_and_not_logprobs():
    # logits [2, 0, -1], token 0. Dividing the log-prob instead would give -0.339692 at 0.5.
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[2.0], [0.0], [-1.0]])
    for temperature, expected in ((1.0, -0.169846), (0.5, -0.020581)):
        logprobs, _ = linear_logprobs(
            hidden, weight, None, torch.tensor([0]), temperature=temperature, chunk_tokens=8
        )
        assert float(logprobs) == pytest.approx(expected, abs=1e-6)


def test_extreme_logits_stay_finite():
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[3e4], [0.0], [-3e4]])
    logprobs, entropy = linear_logprobs(
        hidden, weight, None, torch.tensor([2]), temperature=1.0, chunk_tokens=8
    )
    assert float(logprobs) == -6e4
    assert float(entropy) == 0.0


class LargestResult(TorchDispatchMode):
    """Watches the element count of every tensor that torch makes."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.num_elements = max(self.num_elements, leaf.numel())
        return result


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_all_logits_never_exist_at_once(entropy_gradient):
    # Mutation caught: ignoring chunk_tokens in either pass (64 x 50 elements instead of 8 x 50).
    num_tokens, vocabulary, chunk_tokens = 64, 50, 8
    hidden, weight, _, target = random_case(num_tokens, 4, vocabulary, torch.float32)
    with LargestResult() as largest:
        logprobs, entropy = linear_logprobs(
            hidden,
            weight,
            None,
            target,
            temperature=1.0,
            chunk_tokens=chunk_tokens,
            entropy_gradient=entropy_gradient,
        )
        (logprobs.sum() + entropy.sum()).backward()
    assert largest.num_elements == chunk_tokens * vocabulary
