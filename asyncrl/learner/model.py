"""The policy on one rank: a Transformers model behind our packed forward, sharded with FSDP2.

Master weights are float32. With compute dtype bfloat16, FSDP gathers bfloat16 copies and reduces gradients in
float32. FSDP2 shards dimension 0 the way `torch.chunk` splits it over the ranks: equal chunks of
ceil(rows / ranks), the last ones shorter or empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from asyncrl.config import LearnerConfig
from asyncrl.dtypes import compute_dtype
from asyncrl.errors import LearnerError
from asyncrl.learner.activations import checkpoint_activations
from asyncrl.learner.attention import ATTENTION_NAME, GroupLayout
from asyncrl.learner.lean_blocks import keep_less
from asyncrl.learner.logprobs import linear_logprobs, sum_squared_probabilities
from asyncrl.learner.lora import BASE, adapted_layers, add_adapters, merged_rows
from asyncrl.learner.mesh import data_mesh, tensor_mesh
from asyncrl.learner.packing import PackedMicrobatch
from asyncrl.learner.tensor_parallel import join_shares, owned_rows, parallelize, take_share
from asyncrl.models.weights import load_causal_lm

HEAD_CHECK_TOKENS = 8
"""Of one forward pass when the model is loaded."""


class TensorShard(NamedTuple):
    """One rank's rows of a tensor of the model."""

    name: str
    """As Hugging Face names it."""
    rows: Tensor
    """This rank's rows, float32; the ranks of a copy have every row once. The parameter's own storage, but for a layer
    with an adapter and what tensor ranks hold by columns."""
    shape: tuple[int, ...]
    """Of the full tensor."""
    row_offset: int
    """Where `rows` begins in dimension 0 of the full tensor."""


class PolicyOutput(NamedTuple):
    """Of the N trained tokens of a microbatch; float32."""

    logprobs: Tensor
    """[N], with gradient."""
    entropy: Tensor
    """[N] of the distribution at each token; with gradient where the policy was made so."""
    values: Tensor | None = None
    """[N], with gradient, where the critic shares the policy's body."""
    sum_pi_squared: Tensor | None = None
    """[N] where it was asked for; no gradient."""


class PolicyModel(nn.Module):
    """Maps a packed microbatch to the log-probs of its trained tokens."""

    def __init__(
        self,
        transformer: PreTrainedModel,
        *,
        temperature: float,
        chunk_tokens: int,
        entropy_gradient: bool = False,
        value_head: nn.Linear | None = None,
        tensor: DeviceMesh | None = None,
    ) -> None:
        """`value_head`: of a critic that shares the body; it is trained with it and never published. `tensor`: the
        ranks that compute the same layers together."""
        super().__init__()
        self.transformer = transformer
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.entropy_gradient = entropy_gradient
        self.value_head = value_head
        self.tensor = tensor

    def forward(
        self, batch: PackedMicrobatch, *, sum_pi_squared: bool = False, temperature: float | None = None
    ) -> PolicyOutput:
        """The head is applied here and not by its own module: this is FSDP's root, whose parameters, the head and
        a tied embedding among them, are whole while it runs.

        `temperature`: of the distribution that is scored; None: the rollouts'.
        """
        temperature = self.temperature if temperature is None else temperature
        hidden = predicting_states(self.transformer.get_decoder(), batch)
        values = None if self.value_head is None else apply_value_head(self.value_head, hidden)
        if self.tensor is None:
            logprobs, entropy, squares = self._apply_head(
                hidden, batch.target_ids, temperature, sum_pi_squared
            )
            return PolicyOutput(logprobs, entropy, values, squares)
        # Every tensor rank has the same states and the whole head: each takes a share of the tokens.
        share = self._apply_head(
            take_share(hidden, self.tensor),
            take_share(batch.target_ids, self.tensor),
            temperature,
            sum_pi_squared,
        )
        joined = join_shares(
            torch.stack([column for column in share if column is not None], 1), self.tensor, len(hidden)
        )
        logprobs, entropy, *squares = (column.clone() for column in joined.unbind(1))  # FSDP warns of views
        if not self.entropy_gradient:
            entropy = entropy.detach()
        return PolicyOutput(logprobs, entropy, values, squares[0] if squares else None)

    def _apply_head(
        self, hidden: Tensor, target: Tensor, temperature: float, sum_pi_squared: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """hidden [N, H], target [N] -> log-probs, entropies, and where asked for sums of squared probabilities."""
        head = output_head(self.transformer)
        logprobs, entropy = linear_logprobs(
            hidden,
            head.weight,
            head.bias,
            target,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            entropy_gradient=self.entropy_gradient,
        )
        squares = None
        if sum_pi_squared:
            squares = sum_squared_probabilities(
                hidden, head.weight, head.bias, temperature=temperature, chunk_tokens=self.chunk_tokens
            )
        return logprobs, entropy, squares

    def named_shards(self) -> Iterator[TensorShard]:
        """This rank's rows of every tensor, in the order of Hugging Face's state dict, a tied one once.

        With adapters they are the merged model's, computed as they are asked for. Collective then, and with tensor
        ranks.
        """
        as_shards(self)
        adapted = dict(adapted_layers(self.transformer))
        for name, parameter in self.transformer.named_parameters():
            sharded: Tensor = parameter
            assert isinstance(sharded, DTensor)
            module = name.rpartition(".")[0].removesuffix(BASE)
            if module not in adapted and ".lora_" in name:
                continue
            rows, row_offset = owned_rows(sharded, self.tensor)
            if module in adapted and name.endswith(".weight"):
                rows = merged_rows(adapted[module], rows)
            yield TensorShard(name.replace(BASE, ""), rows, tuple(sharded.shape), row_offset)


def as_shards(model: nn.Module) -> None:
    """Frees what FSDP2 leaves whole after a forward pass without a backward one: the parameters of the root."""
    assert isinstance(model, FSDPModule)
    model.reshard()


def predicting_states(decoder: nn.Module, batch: PackedMicrobatch) -> Tensor:
    """[N, H]: the hidden state that predicts each trained token, which is also the state whose value it has."""
    output = decoder(
        input_ids=batch.token_ids.unsqueeze(0),
        position_ids=batch.position_ids.unsqueeze(0),
        use_cache=False,
        group_layout=batch.layout,
    )
    return output.last_hidden_state[0].index_select(0, batch.predict_index)


def make_value_head(hidden_size: int) -> nn.Linear:
    """One number a state; 0 for every state at first, so that a critic begins without an opinion."""
    head = nn.Linear(hidden_size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def apply_value_head(head: nn.Linear, hidden: Tensor) -> Tensor:
    """hidden [N, H] -> values [N], float32."""
    return (hidden.to(head.weight.dtype) @ head.weight[0] + head.bias).float()


def decoder_blocks(decoder: nn.Module) -> nn.ModuleList:
    """The decoder's blocks, in order: FSDP's units."""
    blocks = decoder.layers
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def output_head(transformer: PreTrainedModel) -> nn.Linear:
    """The linear layer from hidden states to logits; its weight is the embedding's where they are tied."""
    head = transformer.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    return head


def load_policy(
    model_path: Path,
    config: LearnerConfig,
    *,
    temperature: float,
    mesh: DeviceMesh,
    entropy_gradient: bool = False,
    has_value_head: bool = False,
    is_trained: bool = True,
    seed: int = 0,
) -> PolicyModel:
    """Loads a Hugging Face folder in float32 and shards it over `mesh`; `seed` draws adapters, if it has any.

    Dropout is off: the log-probs must be those of the policy that the rollout servers sample from. Raises
    LearnerError for a model that packed groups cannot represent, ConfigError for one whose weights are not all there.
    """
    transformer = load_packed(model_path)
    _check_head(transformer)
    if config.lora is not None and is_trained:
        add_adapters(transformer, config.lora, seed)
    policy = PolicyModel(
        transformer,
        temperature=temperature,
        chunk_tokens=config.logprob_chunk_tokens,
        entropy_gradient=entropy_gradient,
        value_head=make_value_head(transformer.config.hidden_size) if has_value_head else None,
        tensor=tensor_mesh(mesh),
    )
    shard_model(policy, transformer.get_decoder(), config, mesh)
    return policy


def load_packed(model_path: Path) -> PreTrainedModel:
    """A Hugging Face folder in float32, whose attention takes packed groups. Raises LearnerError, ConfigError."""
    _check_supported(AutoConfig.from_pretrained(model_path))
    transformer = load_causal_lm(model_path, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    transformer.eval()
    _check_tensors(transformer)
    return transformer


def shard_model(model: nn.Module, decoder: nn.Module, config: LearnerConfig, mesh: DeviceMesh) -> None:
    """FSDP2 over the data dimensions of `mesh`: a unit a block of `decoder`, and `model` with what is left as the root.

    With a tensor dimension the decoder is cut over it first; raises LearnerError for one that cannot be.
    """
    for block in decoder_blocks(decoder):
        keep_less(block, feed_forward=not config.compile)
    if (tensor := tensor_mesh(mesh)) is not None:
        parallelize(decoder, tensor)
    data = data_mesh(mesh)
    dtype = getattr(torch, compute_dtype(config, mesh.device_type))
    precision = MixedPrecisionPolicy()
    if dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if config.offload and mesh.device_type == "cuda" else OffloadPolicy()
    for block in decoder_blocks(decoder):
        if config.compile:
            feed_forward = block.mlp
            assert isinstance(feed_forward, nn.Module)
            feed_forward.compile(dynamic=True)
        checkpoint_activations(block, config.activation_checkpointing)
        fully_shard(block, mesh=data, mp_policy=precision, offload_policy=offload)
    fully_shard(model, mesh=data, mp_policy=precision, offload_policy=offload)


def _check_supported(config: PreTrainedConfig) -> None:
    layer_types = set(getattr(config, "layer_types", None) or [])
    if unsupported := sorted(layer_types - {"full_attention"}):
        raise LearnerError(
            f"{config.model_type} has {', '.join(unsupported)} layers; packed groups support full attention only"
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        raise LearnerError(
            f"{config.model_type} attends to a sliding window of {window} tokens; packed groups support full "
            "attention only"
        )


@torch.no_grad()
def _check_head(transformer: PreTrainedModel) -> None:
    """The logits must be those of the head alone: some models scale or cap them afterwards, as vLLM does too."""
    ids = torch.arange(HEAD_CHECK_TOKENS) % transformer.config.vocab_size
    inputs: dict[str, Any] = {
        "input_ids": ids[None],
        "position_ids": torch.arange(HEAD_CHECK_TOKENS)[None],
        "use_cache": False,
        "group_layout": GroupLayout([(HEAD_CHECK_TOKENS, [])], torch.device("cpu")),
    }
    logits = transformer(**inputs).logits
    ours = output_head(transformer)(transformer.get_decoder()(**inputs).last_hidden_state)
    if not torch.allclose(logits, ours, rtol=1e-4, atol=1e-4):
        raise LearnerError(
            f"{transformer.config.model_type} does something to its logits after the head (they differ by "
            f"{(logits - ours).abs().max():.3g}), such as scaling or capping; the log-probs of packed groups would "
            "be of another distribution than the rollout servers sample from"
        )


def _check_tensors(transformer: PreTrainedModel) -> None:
    """The state dict must be the parameters and nothing else, and a tied head one parameter."""
    names = {name for name, _ in transformer.named_parameters(remove_duplicate=False)}
    if buffers := sorted(set(transformer.state_dict()) - names):
        raise LearnerError(f"the model saves buffers, which are neither trained nor published: {buffers[:3]}")
    tied = output_head(transformer).weight is transformer.get_input_embeddings().weight
    if transformer.config.tie_word_embeddings and not tied:
        raise LearnerError(
            "the config ties the head to the embedding, but they loaded as two tensors and would train apart; "
            "load a checkpoint that holds one of them"
        )
