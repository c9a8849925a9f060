"""The optimizer step of a rank: learning rate, clipping by the global norm, AdamW or plain SGD.

Taken once a mini-batch, for the policy and for a critic. Everything works on this rank's shards; only the norm needs
the others, and what tensor ranks hold whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from asyncrl.config import LearnerConfig
from asyncrl.errors import LearnerError
from asyncrl.learner.finite import first_non_finite, group_device, shard_norms
from asyncrl.learner.mesh import copy_group, tensor_mesh
from asyncrl.learner.tensor_parallel import is_whole

MOMENTS = ("exp_avg", "exp_avg_sq")
"""As torch's AdamW names what it keeps of every parameter besides its number of steps."""


class ShardedOptimizer:
    """Steps sharded parameters, given by name. Moments are float32, like the master weights."""

    def __init__(self, parameters: dict[str, Parameter], config: LearnerConfig, mesh: DeviceMesh) -> None:
        self.parameters = parameters
        self._config = config
        self._group = copy_group(mesh)
        self._tensor = tensor_mesh(mesh)
        self._whole = {name for name, p in parameters.items() if self._tensor is not None and is_whole(p)}
        self._optimizer: torch.optim.Optimizer
        groups = [{"params": part} for part in _by_mesh(parameters.values())]
        if config.optimizer == "sgd":
            self._optimizer = torch.optim.SGD(groups, lr=config.lr, foreach=False)
        else:
            self._optimizer = torch.optim.AdamW(
                groups,
                lr=config.lr,
                betas=config.betas,
                weight_decay=config.weight_decay,
                fused=True,
            )

    def step(self, version: int, number: int, *, scale: float = 1.0) -> tuple[float, float]:
        """Clips and applies `scale` times the gradients of step `number` (from 1) of batch `version`.

        Then clears them. Collective. Returns (global gradient norm before clipping, learning rate). Raises
        LearnerError on every rank when the norm is not finite: then this step has changed no weight.
        """
        try:
            norm = self._clip(version, number, scale)
            lr = learning_rate(self._config, version)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        return norm, lr

    def drop_gradients(self) -> None:
        """Forgets them: no step is taken."""
        self._optimizer.zero_grad(set_to_none=True)

    @property
    def num_steps(self) -> dict[str, int]:
        """Of each parameter that has moments; none before its first step, and none of plain SGD."""
        state = self._optimizer.state
        return {
            name: int(state[p]["step"]) for name, p in self.parameters.items() if "step" in state.get(p, {})
        }

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's own tensors, by `exp_avg/NAME`: sharded like the parameters."""
        state = self._optimizer.state
        return {
            f"{moment}/{name}": state[self.parameters[name]][moment]
            for moment in MOMENTS
            for name in self.num_steps
        }

    def resume_at(self, num_steps: Mapping[str, int]) -> None:
        """Makes the state of parameters that have taken so many steps; their `moments` are 0, to be filled."""
        for name, number in num_steps.items():
            parameter = self.parameters[name]
            state = {
                moment: torch.zeros_like(parameter, memory_format=torch.preserve_format) for moment in MOMENTS
            }
            step = torch.tensor(float(number), device=_local(parameter).device)
            self._optimizer.state[parameter] = {"step": step, **state}

    def _clip(self, version: int, number: int, scale: float) -> float:
        """Scales the gradients, then to a global norm of at most max_grad_norm; returns the norm in between."""
        gradients = {name: _local(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        self._average_whole(gradients)
        norms = shard_norms(list(gradients.values()))
        sum_of_squares = (norms.square() @ self._shares(gradients).to(norms)).to(group_device(self._group))
        dist.all_reduce(sum_of_squares, group=self._group)
        norm = float(sum_of_squares.sqrt()) * scale
        if not norm < float("inf"):
            index = first_non_finite(norms, self._group)
            name = "the sum over all" if index is None else list(gradients)[index]
            raise LearnerError(
                f"the gradient norm of version {version} is {norm} in step {number} (first in {name}), so this step "
                "was not taken; look at this batch's rewards and log-probs, or lower learner.lr"
            )
        scale *= min(1.0, self._config.max_grad_norm / (norm + 1e-6))
        if scale != 1.0:
            for gradient in gradients.values():
                gradient.mul_(scale)
        return norm

    def _average_whole(self, gradients: dict[str, Tensor]) -> None:
        """Over the tensor group; tensor_parallel.py says why. Collective."""
        if self._tensor is None:
            return
        for name in (name for name in gradients if name in self._whole):
            dist.all_reduce(gradients[name], group=self._tensor.get_group())
            gradients[name].div_(self._tensor.size())

    def _shares(self, gradients: dict[str, Tensor]) -> Tensor:
        """[n]: the part of each gradient's squares that this rank adds: what a tensor group has whole counts once."""
        size = 1 if self._tensor is None else self._tensor.size()
        return torch.tensor([1 / size if name in self._whole else 1.0 for name in gradients])


def learning_rate(config: LearnerConfig, version: int) -> float:
    """Linear warm-up over n = `warmup_versions`: version 0 uses lr / n, version n - 1 and all after it lr."""
    return config.lr * min(1.0, (version + 1) / max(1, config.warmup_versions))


def _local(gradient: Tensor) -> Tensor:
    assert isinstance(gradient, DTensor)
    return gradient.to_local()


def _by_mesh(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """torch's fused steps take parameters of one mesh: those that tensor ranks cut lie on a larger one."""
    parts: dict[DeviceMesh, list[Parameter]] = {}
    for parameter in parameters:
        assert isinstance(parameter, DTensor)
        parts.setdefault(parameter.device_mesh, []).append(parameter)
    return list(parts.values())
