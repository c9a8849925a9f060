"""The models that a rank holds a shard of: the policy, and where the recipe has them, a reference and a critic.

The stages of a recipe ask them for columns; all of these calls are collective and keep no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from asyncrl.config import Config
from asyncrl.learner.critic import Critic
from asyncrl.learner.experience import Microbatch
from asyncrl.learner.mesh import data_group, num_data_ranks
from asyncrl.learner.model import as_shards, load_policy
from asyncrl.learner.reference import BaseReference, Reference
from asyncrl.models.source import resolve_model


class RankModels:
    """Implements stages.Models."""

    def __init__(self, model_path: Path, config: Config, *, mesh: DeviceMesh) -> None:
        """`model_path`: of the policy; the launcher has brought the models that the config names besides."""
        algorithm = config.algorithm
        critic = algorithm.critic
        self.mesh = mesh
        self.num_data_ranks = num_data_ranks(mesh)
        self.data_group = data_group(mesh)
        self.policy = load_policy(
            model_path,
            config.learner,
            temperature=config.rollout.temperature,
            mesh=mesh,
            entropy_gradient=algorithm.loss.entropy.needs_gradient,
            has_value_head=critic is not None and critic.shared,
            seed=config.seed,
        )
        self.reference: Reference | BaseReference | None = None
        if (
            algorithm.needs_reference
            and config.learner.lora is not None
            and algorithm.reference.model is None
        ):
            self.reference = BaseReference(self.policy)
        elif algorithm.needs_reference:
            self.reference = Reference(_folder(algorithm.reference.model, model_path), config, mesh=mesh)
        self.critic: Critic | None = None
        if critic is not None and not critic.shared:
            self.critic = Critic(_folder(critic.model, model_path), config, critic, mesh=mesh)

    def reshard(self) -> None:
        """Back to this rank's shards: a forward pass without a backward pass leaves FSDP's root gathered."""
        for holder in (self.critic, self.reference):
            if holder is not None:
                as_shards(holder.model)
        as_shards(self.policy)

    def critic_shards(self) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's rows) of what a critic adds to the policy: a model, or the head on a shared body."""
        self.reshard()
        module: nn.Module | None = self.policy.value_head
        prefix = "value_head"
        if self.critic is not None:
            module, prefix = self.critic.model, "critic"
        if module is not None:
            for name, parameter in module.named_parameters():
                sharded: Tensor = parameter.detach()
                assert isinstance(sharded, DTensor)
                yield f"{prefix}.{name}", sharded.to_local()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        summed = tensor.clone()
        dist.all_reduce(summed, group=self.data_group)
        return summed

    def gather_columns(self, mine: Tensor, places: Tensor, num_tokens: int) -> Tensor:
        whole = mine.new_zeros(mine.shape[0], num_tokens)
        whole[:, places] = mine
        dist.all_reduce(whole, group=self.data_group)
        return whole

    @torch.no_grad()
    def score(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        output = self.policy(microbatch.pack())
        return output.logprobs, output.entropy

    @torch.no_grad()
    def reference_logprobs(self, microbatch: Microbatch) -> Tensor:
        assert self.reference is not None
        return self.reference.logprobs(microbatch.pack())

    @torch.no_grad()
    def values(self, microbatch: Microbatch) -> Tensor:
        if self.critic is not None:
            return self.critic.model(microbatch.pack())
        values = self.policy(microbatch.pack()).values
        assert values is not None, "a shared critic is a head of the policy"
        return values

    @torch.no_grad()
    def sum_pi_squared(self, microbatch: Microbatch) -> Tensor:
        squares = self.policy(microbatch.pack(), sum_pi_squared=True).sum_pi_squared
        assert squares is not None
        return squares


def _folder(name: str | None, policy: Path) -> Path:
    """Of a model that the launcher has brought here."""
    return policy if name is None else resolve_model(name)
