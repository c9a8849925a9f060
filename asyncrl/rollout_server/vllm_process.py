"""vLLM's processes: their arguments and environment, what they count, and their end. Used by `VllmEngine`."""

from __future__ import annotations

import multiprocessing
import os
from contextlib import suppress
from typing import Any

import psutil

from asyncrl.config import RolloutConfig
from asyncrl.errors import ConfigError
from asyncrl.rollout_server.engine import EngineStatistics
from asyncrl.weight_sync.vllm_plugin import IN_OUR_ENGINE

MAX_BATCHED_TOKENS_CPU = 4096
"""Tokens of one engine step on a CPU, where a prompt must fit into one."""


class Counters:
    """What vLLM's engine reports after each step: a stat logger, in vLLM's words."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_sampled_tokens = 0
        self._num_running = 0
        self._num_waiting = 0
        self._kv_cache_usage = 0.0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None:
            self._num_steps += 1
            self._num_running = scheduler_stats.num_running_reqs
            self._num_waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._kv_cache_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self._num_sampled_tokens += iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None: ...

    def log(self) -> None: ...

    def record_sleep_state(self, is_awake: int, level: int) -> None: ...

    def snapshot(self) -> EngineStatistics:
        return EngineStatistics(
            num_steps=self._num_steps,
            num_running=self._num_running,
            num_waiting=self._num_waiting,
            kv_cache_usage=self._kv_cache_usage,
            num_sampled_tokens=self._num_sampled_tokens,
        )


def engine_args(
    model_path: str, rollout: RolloutConfig, device: str, dtype: str, max_model_len: int
) -> dict[str, Any]:
    """AsyncEngineArgs' fields. Raises ConfigError when rollout.engine_args names one that is not free."""
    fixed: dict[str, Any] = {
        "model": model_path,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
        "generation_config": "vllm",  # the model's own sampling defaults stay out; its EOS tokens still count
        "enable_prefix_caching": True,
        "stream_interval": max_model_len + 1,  # the first token and the end, nothing in between
    }
    if device == "cpu":
        # A seeded request whose prefill is split over two steps kills the worker there (its generator is wound
        # back, and "CPU Generator does not use offset"): so prompts are prefilled whole or not yet.
        fixed |= {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(MAX_BATCHED_TOKENS_CPU, max_model_len),
        }
    if taken := sorted({*fixed, "weight_transfer_config"} & rollout.engine_args.keys()):
        raise ConfigError(
            f"rollout.engine_args.{taken[0]}: asyncrl sets it and relies on its value; remove it"
        )
    chosen: dict[str, Any] = {
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "max_num_seqs": rollout.max_num_seqs,
        "block_size": rollout.block_size,
        "disable_log_stats": True,  # vLLM's own loggers; ours counts
    }
    if device == "cpu":
        chosen |= {"enforce_eager": True, "kv_cache_memory_bytes": int(rollout.kv_cache_gib * 2**30)}
    else:
        chosen |= {"gpu_memory_utilization": rollout.gpu_memory_utilization}
    return {**chosen, **rollout.engine_args, **fixed}


def set_environment(device: str, num_workers: int) -> None:
    """What vLLM reads from the environment, for this process and those it spawns. A user's values stay."""
    os.environ[IN_OUR_ENGINE] = "1"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads that spin take the cores of others
    if device == "cpu":
        # In whole GiB, and it would win over kv_cache_memory_bytes.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", core_lists(os.sched_getaffinity(0), num_workers))


def core_lists(cores: set[int], num_workers: int) -> str:
    """This process's cores dealt out to the workers, "0,1|2,3"; `nobind` when there are too few.

    vLLM's own choice leaves a core free for the engine core, which on a CPU never works at the same time as
    the workers do.
    """
    if len(cores) < num_workers:
        return "nobind"
    ordered, each = sorted(cores), len(cores) // num_workers
    return "|".join(
        ",".join(str(core) for core in ordered[first : first + each])
        for first in range(0, num_workers * each, each)
    )


def engine_core_ids() -> set[int]:
    """Process ids of the engine cores that this process has started."""
    children = multiprocessing.active_children()
    return {child.pid for child in children if child.name.startswith("EngineCore") and child.pid is not None}


def with_descendants(core_ids: set[int]) -> list[psutil.Process]:
    """The engine cores and their workers."""
    found: list[psutil.Process] = []
    for core_id in core_ids:
        with suppress(psutil.NoSuchProcess):
            core = psutil.Process(core_id)
            found += [core, *core.children(recursive=True)]
    return found


def end_processes(processes: list[psutil.Process], timeout_s: float) -> None:
    """Waits for processes that were told to end, and kills those that do not."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=timeout_s)
