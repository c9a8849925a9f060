"""`learner`, `checkpoint`: how a batch becomes a version, and what is kept of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from asyncrl.config.table import Positive, Table

DecayRate = Annotated[float, Field(ge=0, lt=1)]


class LoraTable(Table):
    """Low-rank adapters (arXiv:2106.09685) instead of training every weight."""

    rank: Positive = 16
    """Of each adapter."""
    alpha: Positive = 32
    """The adapter's product is multiplied by alpha / rank."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] = ("all-linear",)
    """Names of the blocks' linear layers that get one, such as q_proj; `[all-linear]`: all but the head."""


class LearnerConfig(Table):
    """The learner ranks."""

    num_ranks: Positive = 1
    """FSDP2 ranks, one a device."""
    replicas: Positive = 1
    """Copies of the model over the ranks (HSDP), each sharded over num_ranks / replicas of them; 1: one copy."""
    tensor_parallel_size: Positive = 1
    """Neighbouring ranks that compute parts of the same layers on the same tokens, as the model's own plan cuts them
    (transformers' base_model_tp_plan). It divides num_ranks / replicas, the heads and the key heads."""
    prompts_per_batch: Positive = 16
    """B: groups that make one version."""
    minibatches: Positive = 1
    """Optimizer steps a batch is split into, in each epoch. At most prompts_per_batch."""
    epochs: Positive = 1
    """Passes over a batch: minibatches x epochs optimizer steps make one version."""
    max_tokens_per_microbatch: Positive = 8192
    """Packed tokens of one forward-backward. A larger group is a microbatch of its own. Tokens."""
    max_versions: Positive = 60
    """Versions to train; the run ends after them."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """`sgd` is plain gradient descent, for comparing gradients."""
    lr: Annotated[float, Field(ge=0)] = 3e-4
    """Peak learning rate."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """AdamW's decay rates, in [0, 1)."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    warmup_versions: Annotated[int, Field(ge=0)] = 0
    """Versions of linear warm-up: the first of n versions uses lr / n. All steps of a version use the same."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this global norm."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; master weights and moments are float32. `auto`: bfloat16 on a GPU, else float32."""
    logprob_chunk_tokens: Positive = 1024
    """Rows of logits held at once when log-probs are computed. Tokens."""
    lora: LoraTable | None = None
    """Train adapters; the model's own weights stay as they are. null: train the model."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What a block computes again in the backward pass instead of keeping it. `selective`: all but matrix products and
    attention, for about a tenth more time. `full`: everything, for about a third more."""
    compile: bool = False
    """torch.compile of each block's feed-forward part; needs a C++ compiler on a CPU. The first versions are slower."""
    offload: bool = False
    """Parameters, gradients and moments in the host's memory, on a GPU only while they are used (FSDP2)."""
    export: bool = True
    """Write the last version in Hugging Face format to `<run>/model` at the end, in the publish dtype: what the
    engines served. (`asyncrl export --dtype` casts.)"""

    @model_validator(mode="after")
    def _ranks_fit(self) -> LearnerConfig:
        size = self.tensor_parallel_size
        if self.num_ranks % (self.replicas * size):
            raise ValueError(
                f"num_ranks: {self.num_ranks} is not a multiple of replicas {self.replicas} x tensor_parallel_size "
                f"{size}"
            )
        for key in ("lora", "compile", "offload"):
            if size > 1 and getattr(self, key):
                raise ValueError(
                    f"{key}: not built for tensor_parallel_size {size}; leave it out, or set tensor_parallel_size: 1"
                )
        return self

    @property
    def num_data_ranks(self) -> int:
        """Ranks with data of their own: a tensor group counts once."""
        return self.num_ranks // self.tensor_parallel_size

    def data_rank(self, rank: int) -> int:
        """Whose share of a plan the learner rank `rank` trains."""
        return rank // self.tensor_parallel_size


class CheckpointConfig(Table):
    """Checkpoints."""

    every: Annotated[int, Field(ge=0)] = 0
    """Versions between checkpoints, from which `--resume` goes on; 0 is never."""
    keep: Positive = 3
    """The newest so many checkpoints stay; older ones are removed."""
