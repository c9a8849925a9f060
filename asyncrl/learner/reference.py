"""The reference model: what the KL terms hold the policy to. Frozen, sharded like the policy.

Where adapters are trained the reference is the policy without them, and takes no memory.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from asyncrl.config import Config
from asyncrl.learner.lora import without_adapters
from asyncrl.learner.model import PolicyModel, load_policy
from asyncrl.learner.packing import PackedMicrobatch


class Reference:
    """Log-probs under a copy of the policy that no optimizer touches."""

    def __init__(self, model_path: Path, config: Config, *, mesh: DeviceMesh) -> None:
        self.model = load_policy(
            model_path, config.learner, temperature=config.rollout.temperature, mesh=mesh, is_trained=False
        ).requires_grad_(False)
        self._refresh_every = config.algorithm.reference.refresh_every

    @torch.no_grad()
    def logprobs(self, batch: PackedMicrobatch) -> Tensor:
        """[N] float32. Collective."""
        return self.model(batch).logprobs

    @torch.no_grad()
    def after_version(self, version: int, policy: PolicyModel) -> None:
        """Takes the policy's weights where `version` is one in `refresh_every`. This rank's shards only."""
        if not self._refresh_every or version % self._refresh_every:
            return
        for mine, theirs in zip(
            self.model.transformer.parameters(), policy.transformer.parameters(), strict=True
        ):
            _local(mine).copy_(_local(theirs))


class BaseReference:
    """Log-probs under the model beneath the policy's adapters."""

    def __init__(self, policy: PolicyModel) -> None:
        self.model = policy

    @torch.no_grad()
    def logprobs(self, batch: PackedMicrobatch) -> Tensor:
        """[N] float32. Collective."""
        with without_adapters(self.model.transformer):
            return self.model(batch).logprobs

    def after_version(self, version: int, policy: PolicyModel) -> None:
        """It never changes."""


def _local(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()
