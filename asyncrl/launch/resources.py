"""Which process runs on which cores and devices. Pure: `asyncrl check` prints what the launcher does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.config import Config
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Placement:
    """What one process gets. The coordinator shares the rollout servers' cores."""

    cores: tuple[int, ...]
    gpus: tuple[int, ...] = ()
    """Empty on a CPU."""

    def environment(self) -> dict[str, str]:
        """Thread counts and devices, set before the process imports torch.

        Idle OpenMP threads must not spin: with more busy threads than cores a step takes five times as long.
        """
        threads = str(len(self.cores))
        variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
        if self.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
        return variables


@dataclass(frozen=True, slots=True)
class Placements:
    """A placement for every process that one node runs."""

    learner: tuple[Placement, ...]
    rollout_servers: tuple[Placement, ...]


def place_processes(config: Config, *, cores: Sequence[int], num_gpus: int) -> Placements:
    """Splits cores (and GPUs) over the roles. Raises ConfigError when a role would get none.

    Cores, `auto`: half to the learner, half to the rollout servers; with one core both share it. GPUs: the
    first `num_ranks` to the learner, then `tensor_parallel_size` to each server.
    """
    num_ranks, num_servers = config.learner.num_ranks, config.rollout.num_servers
    if isinstance(config.resources.cores, dict):
        learner_cores = config.resources.cores.get("learner", tuple(cores))
        server_cores = config.resources.cores.get("rollout_server", tuple(cores))
    elif not num_servers or len(cores) < 2:
        learner_cores = server_cores = tuple(cores)
    else:
        half = len(cores) // 2
        learner_cores, server_cores = tuple(cores[half:]), tuple(cores[:half])
    gpus = _split_gpus(config, num_gpus) if num_gpus else [()] * (num_ranks + num_servers)
    places = [*_deal(learner_cores, num_ranks), *_deal(server_cores, num_servers)]
    placed = tuple(Placement(own, devices) for own, devices in zip(places, gpus, strict=True))
    return Placements(placed[:num_ranks], placed[num_ranks:])


def _split_gpus(config: Config, num_gpus: int) -> list[tuple[int, ...]]:
    num_ranks, width = config.learner.num_ranks, config.rollout.tensor_parallel_size
    needed = num_ranks + config.rollout.num_servers * width
    if needed > num_gpus:
        raise ConfigError(
            f"resources: {num_ranks} learner ranks and {config.rollout.num_servers} rollout servers of {width} "
            f"GPUs need {needed} GPUs, and this node has {num_gpus}; lower learner.num_ranks or "
            "rollout.num_servers"
        )
    of_ranks = [(gpu,) for gpu in range(num_ranks)]
    starts = range(num_ranks, needed, width)
    return of_ranks + [tuple(range(start, start + width)) for start in starts]


def _deal(cores: tuple[int, ...], num_processes: int) -> list[tuple[int, ...]]:
    """Equal runs of cores; processes share all of them when there are fewer cores than processes."""
    if num_processes == 0:
        return []
    each = len(cores) // num_processes
    if each == 0:
        return [cores] * num_processes
    return [cores[i * each : (i + 1) * each] for i in range(num_processes)]


def available_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def count_gpus(config: Config) -> int:
    """GPUs of this node that the config allows; looks without importing torch, which takes seconds."""
    if config.resources.devices == "cpu":
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = sum(1 for name in _listdir("/proc/driver/nvidia/gpus") if name)
    num_gpus = present if visible is None else min(present, len([d for d in visible.split(",") if d.strip()]))
    if config.resources.devices == "cuda" and not num_gpus:
        raise ConfigError("resources.devices: cuda was asked for, and this node shows no NVIDIA GPU; use cpu")
    return num_gpus


def _listdir(path: str) -> list[str]:
    return os.listdir(path) if os.path.isdir(path) else []
