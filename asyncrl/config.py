"""The typed configuration tree: every key, its default, its unit.

The defaults together run offline (model `tiny`, task `rev4`). Unknown keys are refused, and so is a value
that names something not built yet: see `load_config` in config_file.py, which turns YAML and dotted
overrides into a `Config` or one ConfigError that lists every mistake.
"""

from __future__ import annotations

import ipaddress
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
DecayRate = Annotated[float, Field(ge=0, lt=1)]


def _not_built(value: Any, built: tuple[Any, ...]) -> Any:
    """Refuses a documented value whose part does not exist yet."""
    if value not in built:
        choices = ", ".join(repr(choice) for choice in built)
        raise ValueError(f"{value!r} is not built yet; use {choices}")
    return value


class Table(BaseModel):
    """A table of the tree: frozen; unknown keys, NaN and Inf are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class TruncatedImportanceSampling(Table):
    """w = min(exp(proximal_logprobs - rollout_logprobs), cap), per token, no gradient through it."""

    type: Literal["tis"] = "tis"
    cap: Annotated[float, Field(gt=0)] = 2.0
    """Upper bound of the importance weight."""


class NoCorrection(Table):
    """Every importance weight is 1."""

    type: Literal["none"] = "none"


class GrpoConfig(Table):
    """GRPO (arXiv:2402.03300): advantages from the rewards of one prompt's group, clipped policy loss."""

    type: Literal["grpo"] = "grpo"
    scale: Literal["std", "none"] = "std"
    """Divide centred rewards by the group's standard deviation (n - 1), or leave them (Dr.GRPO)."""
    std_epsilon: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the standard deviation."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The probability ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """See clip_low."""
    correction: Annotated[TruncatedImportanceSampling | NoCorrection, Field(discriminator="type")] = (
        TruncatedImportanceSampling()
    )
    """Off-policy correction of tokens that an older version, or another engine, sampled: `tis` or `none`."""

    @field_validator("correction", mode="before")
    @classmethod
    def _tis_by_default(cls, value: Any) -> Any:
        return {"type": "tis", **value} if isinstance(value, dict) else value


class DataConfig(Table):
    """Where prompts come from."""

    train: str = "rev4"
    """A JSONL file, `module:attr` of a generator `f(seed) -> rows`, or a task: rev4, sort4, first_word."""
    eval: str | None = None
    """The data set of evaluations, named like `train`; null is none."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: a list of chat messages, or a string."""
    answer_key: str = "answer"
    """Column that the built-in rewards compare with."""
    as_chat: bool = False
    """Make a string prompt one user message and apply the chat template (a list always gets it)."""
    system_prompt: str | None = None
    """System message put before chat prompts that have none."""
    max_prompt_tokens: Positive = 512
    """Longer prompts are dropped, counted and shown. Tokens."""
    max_rows: Positive = 10_000
    """At most this many rows are taken from a generator."""

    @field_validator("eval")
    @classmethod
    def _built(cls, value: str | None) -> str | None:
        return _not_built(value, (None,))


class EvalConfig(Table):
    """Evaluation while training."""

    every: Annotated[int, Field(ge=0)] = 0
    """Versions between evaluations; 0 is never."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature of evaluations; 0 is greedy."""
    num_samples: Positive = 1
    """Completions of each evaluation prompt."""

    @field_validator("every", "temperature")
    @classmethod
    def _built(cls, value: float) -> float:
        return _not_built(value, (0,))

    @field_validator("num_samples")
    @classmethod
    def _num_samples_built(cls, value: int) -> int:
        return _not_built(value, (1,))


class RolloutConfig(Table):
    """The rollout servers."""

    engine: Literal["vllm"] = "vllm"
    """Inference engine behind the Engine seam."""
    num_servers: Annotated[int, Field(ge=0)] = 1
    """Servers that `asyncrl train` starts on this node. More may connect, and leave, at any time."""
    tensor_parallel_size: Positive = 1
    """Devices one engine spans."""
    group_size: Positive = 8
    """Trajectories a prompt."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Sampling temperature. The learner divides its logits by it too. vLLM would raise smaller ones to 0.01."""
    top_p: float = 1.0
    """Only 1.0: a truncated distribution cannot be scored by the learner."""
    top_k: int = 0
    """Only 0 (off), for the same reason."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion, besides the model's EOS tokens."""
    max_completion_tokens: Positive = 8
    """Longest completion. Tokens."""
    max_groups_in_flight: Positive | Literal["auto"] = "auto"
    """Groups that one server generates at once; `auto` is what its KV cache and max_num_seqs hold."""
    max_num_seqs: Positive = 128
    """Sequences that the engine runs at once. No request waits inside vLLM beyond it."""
    kv_cache_gib: Annotated[float, Field(gt=0)] = 1.0
    """Memory of the KV cache on a CPU. GiB."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Share of each device's memory the engine may use on a GPU."""
    block_size: Positive | None = None
    """Tokens a KV block (a multiple of 32 on a CPU); null is vLLM's own choice (128 on a CPU)."""
    engine_args: dict[str, Any] = {}
    """Passed on to the engine as they are, after the keys above."""

    @field_validator("engine_args")
    @classmethod
    def _finite(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(value, allow_nan=False)
        except ValueError as error:
            raise ValueError("holds a number that is not finite; every number must be") from error
        return value

    @field_validator("top_p")
    @classmethod
    def _whole_distribution_p(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError(
                f"top_p {value} truncates the distribution, so the learner's log-probs would be of another "
                "one; train with 1.0"
            )
        return value

    @field_validator("top_k")
    @classmethod
    def _whole_distribution_k(cls, value: int) -> int:
        if value != 0:
            raise ValueError(
                f"top_k {value} truncates the distribution, so the learner's log-probs would be of another "
                "one; train with 0"
            )
        return value


class LearnerConfig(Table):
    """The learner ranks."""

    num_ranks: Positive = 1
    """FSDP2 ranks."""
    prompts_per_batch: Positive = 16
    """B: groups that make one version."""
    minibatches: Positive = 1
    """Optimizer steps a batch is split into."""
    epochs: Positive = 1
    """Passes over a batch."""
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
    """Versions of linear warm-up: the first of n steps uses lr / n."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this global norm."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; master weights and moments are float32. `auto`: bfloat16 on a GPU, else float32."""
    logprob_chunk_tokens: Positive = 1024
    """Rows of logits held at once when log-probs are computed. Tokens."""
    export: bool = True
    """Write the last version in Hugging Face format to `<run>/model` at the end."""

    @field_validator("minibatches", "epochs")
    @classmethod
    def _built(cls, value: int) -> int:
        return _not_built(value, (1,))


class WeightSyncConfig(Table):
    """How new policy versions reach the rollout servers."""

    transport: Literal["auto", "shm", "gloo", "disk", "zmq", "nccl", "cuda_ipc"] = "auto"
    """`shm`: one shared-memory file a version, mapped by the engines of the same node."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Publish dtype; `auto` is the learner's compute dtype."""
    verify: Literal["checksum"] = "checksum"
    """Every server checks the blake3 digest of every tensor before it applies a version."""
    kv_on_update: Literal["keep", "reset"] = "keep"
    """Requests in flight keep their KV cache across an update, or are prefilled again."""
    dir: str = "/dev/shm"
    """Folder of the snapshots. Two of them exist at once."""

    @field_validator("transport")
    @classmethod
    def _transport_built(cls, value: str) -> str:
        return _not_built(value, ("auto", "shm"))

    @field_validator("kv_on_update")
    @classmethod
    def _kv_built(cls, value: str) -> str:
        return _not_built(value, ("keep",))


class StreamConfig(Table):
    """The ZeroMQ stream between coordinator, rollout servers and learner ranks."""

    bind: str = "127.0.0.1"
    """Address the coordinator listens on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port; 0 takes a free one and reports it."""
    max_message_bytes: Positive = 1 << 28
    """A larger message is refused by its sender with an error. Bytes."""
    insecure: bool = False
    """Allow a bind address off loopback without keys."""
    keys_dir: str | None = None
    """Folder of the keys that encrypt and authenticate the stream; null is none."""

    @field_validator("bind")
    @classmethod
    def _loopback(cls, value: str) -> str:
        try:
            address = ipaddress.ip_address(value)
        except ValueError as error:
            raise ValueError(f"{value!r} is not an IP address; use 127.0.0.1 or ::1") from error
        if not address.is_loopback:
            raise ValueError(
                f"{value} is not loopback, and the encrypted stream is not built yet; use 127.0.0.1 or ::1"
            )
        return value

    @field_validator("insecure")
    @classmethod
    def _insecure_built(cls, value: bool) -> bool:
        return _not_built(value, (False,))

    @field_validator("keys_dir")
    @classmethod
    def _keys_dir_built(cls, value: str | None) -> str | None:
        return _not_built(value, (None,))


class ResourcesConfig(Table):
    """Which role runs on what."""

    cores: Literal["auto"] | dict[str, tuple[int, ...]] = "auto"
    """`auto`: the first half of this node's cores is the rollout servers', the rest the learner's, also when
    `asyncrl learner` or `asyncrl rollout-server` starts one role alone. rollout.num_servers=0 says that no
    server shares the learner's node: a role that starts alone then gets every core. Or by role:
    {learner: [0], rollout_server: [1]}."""
    devices: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is cuda where torch sees a GPU, else cpu."""

    @field_validator("cores")
    @classmethod
    def _roles(cls, value: Any) -> Any:
        if isinstance(value, dict):
            if unknown := set(value) - {"learner", "rollout_server"}:
                raise ValueError(f"unknown role {sorted(unknown)}; the roles are learner and rollout_server")
            if empty := [role for role, cores in value.items() if not cores]:
                raise ValueError(f"{empty[0]} has no core; give it at least one")
        return value


class TimeoutsConfig(Table):
    """Deadlines, in seconds. Every wait has one."""

    engine_start_s: Seconds = 300.0
    """A rollout server's engine must be up."""
    learner_start_s: Seconds = 300.0
    """Every learner rank must have loaded its model."""
    connect_s: Seconds = 60.0
    """A process must have met the coordinator."""
    lease_s: Seconds = 60.0
    """A server whose engine makes no step for so long loses its leases."""
    idle_s: Seconds = 600.0
    """The run ends with an error when no batch is trained for so long."""
    sync_s: Seconds = 300.0
    """A server must have applied a version it began."""
    ready_s: Seconds = 60.0
    """A server must have answered that it can take a streamed version."""
    heartbeat_s: Seconds = 30.0
    """A peer that is silent for so long is lost; heartbeats are sent three times as often."""
    reward_s: Seconds = 10.0
    """One reward; its process is killed after it."""
    collective_s: Seconds = 600.0
    """A torch.distributed collective."""
    shutdown_s: Seconds = 20.0
    """A process that was told to stop is killed after it."""

    @field_validator("ready_s")
    @classmethod
    def _built(cls, value: float) -> float:
        return _not_built(value, (60.0,))


class CheckpointConfig(Table):
    """Checkpoints."""

    every: Annotated[int, Field(ge=0)] = 0
    """Versions between checkpoints; 0 is never."""
    keep: Positive = 3
    """The newest so many checkpoints stay; older ones are removed."""

    @field_validator("every")
    @classmethod
    def _every_built(cls, value: int) -> int:
        return _not_built(value, (0,))

    @field_validator("keep")
    @classmethod
    def _keep_built(cls, value: int) -> int:
        return _not_built(value, (3,))


class RunConfig(Table):
    """The run directory `<dir>/<name>`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    """Letters, digits, `.`, `_`, `-`; null makes one from the time."""
    dir: str = "runs"
    """Parent folder."""
    trackers: tuple[str, ...] = ()
    """Experiment trackers."""
    trajectories_per_version: Annotated[int, Field(ge=0)] | Literal["all"] = "all"
    """Trajectories written to `trajectories/version_*.jsonl` for each version."""

    @field_validator("trackers")
    @classmethod
    def _built(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _not_built(value, ((),))


class Config(Table):
    """The whole tree. `asyncrl check CONFIG` prints what it amounts to."""

    mode: Literal["disaggregated", "colocated"] = "disaggregated"
    """Rollout servers and learner on devices of their own, or both on the same ones."""
    launcher: Literal["local", "ray"] = "local"
    """Who starts the processes."""
    model: str = "tiny"
    """A Hugging Face name, a folder, or `tiny`: 0.4M parameters, made and warmed up on the spot."""
    algorithm: GrpoConfig = GrpoConfig()
    """A recipe by name (`grpo`), or a table {type: grpo, ...}."""
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """S: no token older than S versions trains (except under `over_age: keep`)."""
    over_age: Literal["mask", "keep", "wait", "drop"] = "mask"
    """What happens to tokens past the bound: left out of the loss, or trained with importance weights."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seeds the data order and every request."""
    data: DataConfig = DataConfig()
    reward: str = "exact_match"
    """exact_match, gsm8k_strict, gsm8k_flexible, or `module:attr` of `f(completion, row) -> float`."""
    eval: EvalConfig = EvalConfig()
    rollout: RolloutConfig = RolloutConfig()
    learner: LearnerConfig = LearnerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    stream: StreamConfig = StreamConfig()
    resources: ResourcesConfig = ResourcesConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()

    @field_validator("algorithm", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value

    @field_validator("mode")
    @classmethod
    def _mode_built(cls, value: str) -> str:
        return _not_built(value, ("disaggregated",))

    @field_validator("launcher")
    @classmethod
    def _launcher_built(cls, value: str) -> str:
        return _not_built(value, ("local",))

    @field_validator("over_age")
    @classmethod
    def _over_age_built(cls, value: str) -> str:
        return _not_built(value, ("mask", "keep"))

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        if self.rollout.group_size < 2:
            raise ValueError("rollout.group_size 1 gives grpo no group to compare with; use at least 2")
        if self.rollout.group_size > self.rollout.max_num_seqs:
            raise ValueError(
                f"rollout.group_size {self.rollout.group_size} exceeds rollout.max_num_seqs "
                f"{self.rollout.max_num_seqs}; a group must fit the engine at once"
            )
        in_flight = self.rollout.max_groups_in_flight
        if in_flight != "auto" and in_flight * self.rollout.group_size > self.rollout.max_num_seqs:
            raise ValueError(
                f"rollout.max_groups_in_flight {in_flight} x group_size {self.rollout.group_size} exceeds "
                f"rollout.max_num_seqs {self.rollout.max_num_seqs}; requests would wait inside vLLM"
            )
        return self
