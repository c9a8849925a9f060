"""Which process runs on which cores and devices. Pure but for `available_cores` and `visible_gpus`.

The launcher places processes by it, `asyncrl check` prints what it would do.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from asyncrl.config import Config
from asyncrl.errors import ConfigError

ROLES = ("learner", "rollout-server")
"""The roles whose processes a launcher starts."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What one process gets."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...] = ()
    """Entries of this node's own CUDA_VISIBLE_DEVICES: numbers or UUIDs. Empty on a CPU."""

    def environment(self) -> dict[str, str]:
        """Thread counts and devices, set before the process imports torch.

        Idle OpenMP threads must not spin: with more busy threads than cores a step takes five times as long.
        """
        threads = str(len(self.cores))
        return {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",
            "CUDA_VISIBLE_DEVICES": ",".join(self.gpus),  # empty: none at all
        }


@dataclass(frozen=True, slots=True)
class Placements:
    """A placement for every process that this launcher starts."""

    learner: tuple[Placement, ...]
    rollout_servers: tuple[Placement, ...]


def place_processes(
    config: Config, *, cores: Sequence[int], gpus: Sequence[str], start: Collection[str] = ROLES
) -> Placements:
    """Places the processes of the roles in `start`. Raises ConfigError when there are too few devices.

    GPUs: the first `num_ranks` to the learner, then `tensor_parallel_size` to each server.
    """
    num_ranks = config.learner.num_ranks if "learner" in start else 0
    num_servers = config.rollout.num_servers if "rollout-server" in start else 0
    dealt_cores = [
        *_deal_cores(config, "learner", cores, num_ranks),
        *_deal_cores(config, "rollout-server", cores, num_servers),
    ]
    dealt_gpus = _deal_gpus(config, gpus, num_ranks, num_servers)
    placed = tuple(Placement(*both) for both in zip(dealt_cores, dealt_gpus, strict=True))
    return Placements(placed[:num_ranks], placed[num_ranks:])


def place_one_server(config: Config, *, cores: Sequence[int], gpus: Sequence[str]) -> Placement:
    """For a server that was started by hand: all the servers' cores, and the first GPUs that no rank uses.

    `rollout.num_servers: 0` says that the ranks are on another node. A second server by hand needs
    CUDA_VISIBLE_DEVICES to keep off the first one's GPUs.
    """
    num_ranks = config.learner.num_ranks if config.rollout.num_servers else 0
    return Placement(
        cores_of(config, "rollout-server", cores), _deal_gpus(config, gpus, num_ranks, 1)[num_ranks]
    )


def cores_of(config: Config, role: str, cores: Sequence[int]) -> tuple[int, ...]:
    """A role's share of `cores`, as the config's key resources.cores says. Raises ConfigError."""
    if isinstance(config.resources.cores, dict):
        key = role.replace("-", "_")
        own = config.resources.cores.get(key, tuple(cores))
        if missing := set(own) - set(cores):
            raise ConfigError(
                f"resources.cores.{key}: {sorted(missing)} cannot be used; this process may run on {list(cores)}"
            )
        return own
    if not config.rollout.num_servers or len(cores) < 2:
        return tuple(cores)
    half = len(cores) // 2
    return tuple(cores[half:] if role == "learner" else cores[:half])


def _deal_cores(config: Config, role: str, cores: Sequence[int], num_processes: int) -> list[tuple[int, ...]]:
    """Equal runs of the role's cores; all share them when there are fewer cores than processes."""
    if not num_processes:
        return []
    own = cores_of(config, role, cores)
    each = len(own) // num_processes
    if not each:
        return [own] * num_processes
    return [own[i * each : (i + 1) * each] for i in range(num_processes)]


def _deal_gpus(
    config: Config, gpus: Sequence[str], num_ranks: int, num_servers: int
) -> list[tuple[str, ...]]:
    """Ranks first. On a node without GPUs every process gets none."""
    if not gpus:
        return [()] * (num_ranks + num_servers)
    width = config.rollout.tensor_parallel_size
    needed = num_ranks + num_servers * width
    if needed > len(gpus):
        raise ConfigError(
            f"resources: {num_ranks} learner ranks and {num_servers} rollout servers of {width} GPUs need "
            f"{needed} GPUs, and this node shows {len(gpus)} ({', '.join(gpus)}); lower learner.num_ranks, "
            "rollout.num_servers or rollout.tensor_parallel_size"
        )
    starts = range(num_ranks, needed, width)
    return [(gpu,) for gpu in gpus[:num_ranks]] + [tuple(gpus[i : i + width]) for i in starts]


def available_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def visible_gpus(config: Config) -> tuple[str, ...]:
    """This node's GPUs that the config allows, as CUDA_VISIBLE_DEVICES names them.

    Looks without importing torch, which takes seconds. Raises ConfigError when cuda is asked for and there
    is none.
    """
    if config.resources.devices == "cpu":
        return ()
    gpus = _visible(os.environ.get("CUDA_VISIBLE_DEVICES"), num_present=_num_gpus_present())
    if config.resources.devices == "cuda" and not gpus:
        raise ConfigError(
            "resources.devices: cuda was asked for, and this node shows no NVIDIA GPU "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'is not set')}); use cpu"
        )
    return gpus


def count_gpus(config: Config) -> int:
    """How many `visible_gpus` there are."""
    return len(visible_gpus(config))


def _visible(variable: str | None, num_present: int) -> tuple[str, ...]:
    """What CUDA makes of the variable: the entries before the first that names no GPU, such as -1."""
    if variable is None or not num_present:
        return tuple(map(str, range(num_present)))
    gpus: list[str] = []
    for entry in variable.split(","):
        entry = entry.strip()
        is_uuid = entry.startswith(("GPU-", "MIG-"))
        if not is_uuid and not (entry.isdecimal() and int(entry) < num_present):
            break
        gpus.append(entry)
    return tuple(gpus)


def _num_gpus_present() -> int:
    folder = "/proc/driver/nvidia/gpus"
    return len(os.listdir(folder)) if os.path.isdir(folder) else 0
