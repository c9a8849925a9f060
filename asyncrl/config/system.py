"""`weight_sync`, `stream`, `resources`, `timeouts`, `run`: the ground that a run stands on."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from asyncrl.config.table import Positive, Seconds, Table, not_built


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
        return not_built(value, ("auto", "shm"))

    @field_validator("kv_on_update")
    @classmethod
    def _kv_built(cls, value: str) -> str:
        return not_built(value, ("keep",))


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
        return not_built(value, (False,))

    @field_validator("keys_dir")
    @classmethod
    def _keys_dir_built(cls, value: str | None) -> str | None:
        return not_built(value, (None,))


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
    """Deadlines, in seconds. Every wait has one, but for the model's download, which shows its progress."""

    engine_start_s: Seconds = 300.0
    """A rollout server's engine must be up."""
    learner_start_s: Seconds = 300.0
    """Every learner rank must have loaded its model."""
    connect_s: Seconds = 60.0
    """A process must have met the coordinator."""
    lease_s: Seconds = 60.0
    """A server whose engine makes no step for so long loses its leases."""
    idle_s: Seconds = 600.0
    """The run ends with an error when for so long no group arrives, no version is published, none committed."""
    sync_s: Seconds = 300.0
    """A server must have applied a version it began."""
    ready_s: Seconds = 60.0
    """A server must have answered that it can take a streamed version."""
    heartbeat_s: Seconds = 30.0
    """A peer that is silent for so long is lost; heartbeats are sent three times as often."""
    eval_s: Seconds = 600.0
    """An evaluation must begin so long after its version was published, and end so long after it began; else it is
    cut, counted and shown."""
    reward_s: Seconds = 10.0
    """One reward; its process is killed after it."""
    collective_s: Seconds = 600.0
    """A torch.distributed collective."""
    shutdown_s: Seconds = 20.0
    """A process that was told to stop is killed after it."""
    trackers_s: Seconds = 60.0
    """When a run ends, its trackers have so long to send what is left."""

    @field_validator("ready_s")
    @classmethod
    def _built(cls, value: float) -> float:
        return not_built(value, (60.0,))


class RunConfig(Table):
    """The run directory `<dir>/<name>`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    """Letters, digits, `.`, `_`, `-`; null makes one from the time."""
    dir: str = "runs"
    """Parent folder."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = ()
    """Experiment trackers that get every number of metrics.jsonl and a table of samples: a name, or a list."""
    samples_per_version: Annotated[int, Field(ge=0)] = 8
    """Rows (prompt, completion, reward, versions) of the trackers' table, for each version; 0 is no table."""
    project: Annotated[str, Field(max_length=128, pattern=r"^[^/\\#?%:]+$")] = "asyncrl"
    """Project (W&B, trackio) or experiment (MLflow) of the trackers: up to 128 characters, none of / \\ # ? % :"""
    trajectories_per_version: Annotated[int, Field(ge=0)] | Literal["all"] = "all"
    """Trajectories written to `trajectories/version_*.jsonl` for each version. `trajectories/untrainable.jsonl` gets as
    many a version, and at most prompts_per_batch groups of them."""

    @field_validator("trackers", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        if isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) else value
