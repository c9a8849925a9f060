"""What the golden files of losses share: inputs with a gradient, and the comparison of a loss with its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.algorithms.goldens import Golden, as_tensor, assert_equal


def flat_leaf(case: Golden, name: str) -> Tensor:
    """An input [B, T] as its trained tokens [N], which gathers a gradient."""
    return case.flat(name).requires_grad_()


def compare_loss(case: Golden, loss: Tensor, leaves: dict[str, Tensor]) -> None:
    """The loss, and its gradient with respect to each leaf: at the trained tokens, and 0 outside the mask."""
    assert_equal(case, "loss", loss, case.output("loss"))
    if loss.requires_grad:
        loss.backward()
    compare_gradients(case, leaves)


def gradient(leaf: Tensor) -> Tensor:
    """0 where the loss does not depend on it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def compare_gradients(case: Golden, leaves: dict[str, Tensor]) -> None:
    for name, leaf in leaves.items():
        if f"grad_{name}" in case.outputs:
            found = torch.zeros(case.mask.shape, dtype=case.dtype)
            found[case.mask] = gradient(leaf)
            assert_equal(
                case, f"gradient of {name}", found, as_tensor(case.outputs[f"grad_{name}"], case.dtype)
            )
