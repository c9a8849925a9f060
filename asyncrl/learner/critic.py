"""The critic: a model that values every state of a trajectory, with FSDP2 shards and an optimizer of its own."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from asyncrl.config import Config
from asyncrl.config.algorithm import CriticConfig
from asyncrl.learner.model import (
    apply_value_head,
    load_packed,
    make_value_head,
    predicting_states,
    shard_model,
)
from asyncrl.learner.optimizer import ShardedOptimizer
from asyncrl.learner.packing import PackedMicrobatch


class ValueModel(nn.Module):
    """A decoder with a value head. The value of a token is that of the state before it, which predicts it."""

    def __init__(self, decoder: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = head

    def forward(self, batch: PackedMicrobatch) -> Tensor:
        """[N] float32, with gradient."""
        return apply_value_head(self.head, predicting_states(self.decoder, batch))


class Critic:
    """A critic of its own body. (One that shares the policy's is a head of PolicyModel.)"""

    def __init__(
        self,
        model_path: Path,
        config: Config,
        critic: CriticConfig,
        *,
        mesh: DeviceMesh,
    ) -> None:
        transformer = load_packed(model_path)
        decoder = transformer.get_decoder()
        self.model = ValueModel(decoder, make_value_head(transformer.config.hidden_size))
        shard_model(self.model, decoder, config.learner, mesh)
        learner = config.learner.model_copy(update={"lr": critic.lr})
        self.optimizer = ShardedOptimizer(dict(self.model.named_parameters()), learner, mesh)
