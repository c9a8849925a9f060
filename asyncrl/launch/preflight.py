"""Everything that can be wrong with a configuration, looked at before any process of the run starts.

`prepare` (a run) and `asyncrl check` both call `check_config` and then, when the model is there,
`check_model`: what the one refuses, the other does. The sizes that a configuration amounts to are computed
here once. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import Config
from asyncrl.dtypes import compute_dtype, publish_dtype
from asyncrl.envs.dataset import Dataset, SourceRows, load_rows, load_tokenizer, tokenize
from asyncrl.envs.reward_checks import check_rows, resolve_rewards
from asyncrl.envs.supervised import (
    SupervisedDataset,
    load_supervised_rows,
    max_row_tokens,
    tokenize_supervised,
)
from asyncrl.errors import ConfigError
from asyncrl.launch.algorithm_checks import check_algorithm, check_named_model, named_models
from asyncrl.launch.model_facts import (
    adapted_layers,
    check_length,
    check_tensor_parallel,
    read_tensor_shapes,
)
from asyncrl.launch.resources import ROLES, Placements, available_cores, place_processes, visible_gpus
from asyncrl.models.source import model_folder, model_is_ready, resolve_model
from asyncrl.rollout_server.vllm_process import engine_args
from asyncrl.run_directory import exists_already, run_path
from asyncrl.stream.sizes import (
    max_eval_bytes,
    max_eval_completion_tokens,
    max_group_bytes,
    max_shard_bytes,
)
from asyncrl.stream.sockets import check_can_bind
from asyncrl.trackers.tracker import check_trackers
from asyncrl.weight_sync.manifest import ITEMSIZES, lay_out
from asyncrl.weight_sync.snapshot import bytes_free

CPU_BLOCK_TOKENS = 32
"""The CPU engine's KV blocks are multiples of it."""
NUM_SNAPSHOTS = 2
"""Snapshots at their peak: version v is unlinked when v + 1 is finished."""


@dataclass(frozen=True, slots=True)
class Examined:
    """A configuration that fits this node, before its model is looked at."""

    config: Config
    placements: Placements
    device: str
    """cpu | cuda"""
    rows: list[SourceRows]
    """Of data.train, a source each."""
    eval_rows: list[SourceRows]
    """Of data.eval."""
    supervised_rows: list[SourceRows]
    """Of data.supervised."""


def check_config(config: Config, start: Collection[str] = ROLES, *, resumes: bool = False) -> Examined:
    """What needs no model: devices, engine, messages, folders, reward, rows. Raises ConfigError, DataError.

    `start`: the roles whose processes this node starts. `resumes`: whether the run directory is there already.
    """
    gpus = visible_gpus(config)
    device = "cuda" if gpus else "cpu"
    placements = place_processes(config, cores=available_cores(), gpus=gpus, start=start)
    check_engine(config, device)
    if config.learner.offload and device == "cpu":
        raise ConfigError(
            "learner.offload: true keeps a GPU's memory free, and no GPU is used here; leave it out"
        )
    check_can_bind(config.stream.bind, config.stream.port)
    _check_messages(config)
    _check_folders(config, resumes=resumes)
    check_algorithm(config)
    check_trackers(config.run.trackers)
    _check_evaluation(config)
    rewards = resolve_rewards(config)
    rows = load_rows(config.data.train, config.data, config.seed)
    eval_rows = load_eval_rows(config)
    check_rows(config, rewards, [*rows, *eval_rows])
    return Examined(config, placements, device, rows, eval_rows, load_supervised_rows(config))


def check_rewards(config: Config, rows: Iterable[SourceRows]) -> None:
    """The rewards against `rows`; once more when reward models have come. Raises ConfigError, DataError."""
    check_rows(config, resolve_rewards(config), rows)


def load_eval_rows(config: Config) -> list[SourceRows]:
    """The rows of data.eval. A generator gets the next seed: not the rows that it gives for training."""
    return load_rows(config.data.eval, config.data, config.seed + 1, "data.eval")


def check_model(examined: Examined, model_path: Path) -> tuple[Dataset, Dataset, SupervisedDataset]:
    """What the model's folder decides: lengths, snapshots, the data as tokens. Raises ConfigError, DataError.

    Returns the prompts of data.train, those of data.eval and the rows of data.supervised; the last two may be none.
    """
    config = examined.config
    check_length(model_path, max_sequence_tokens(config))
    if config.data.supervised:
        check_length(model_path, max_row_tokens(config), what="data.max_supervised_tokens")
    check_tensor_parallel(model_path, config.learner.tensor_parallel_size)
    if config.learner.lora is not None:
        adapted_layers(model_path, config.learner.lora)
    for key, name in named_models(config).items():
        if model_is_ready(name):
            check_named_model(config, key, resolve_model(name), model_path, max_sequence_tokens(config))
    needed = snapshot_bytes(config, model_path, examined.device)
    free = bytes_free(config.weight_sync.dir)
    if needed > free:
        raise ConfigError(
            f"weight_sync.dir: {config.weight_sync.dir} has {free} bytes free and two snapshots need {needed}; "
            "name a folder with more room"
        )
    tokenizer = load_tokenizer(model_path)
    return (
        tokenize(examined.rows, config.data, tokenizer),
        tokenize(examined.eval_rows, config.data, tokenizer),
        tokenize_supervised(examined.supervised_rows, config, tokenizer),
    )


def check_engine(config: Config, device: str) -> None:
    """Raises ConfigError for engine settings that asyncrl or the device does not allow."""
    block_size = config.rollout.block_size
    if device == "cpu" and block_size is not None and block_size % CPU_BLOCK_TOKENS:
        raise ConfigError(
            f"rollout.block_size: {block_size} is not a multiple of {CPU_BLOCK_TOKENS}, which the engine "
            f"needs on a CPU; use {-(-block_size // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS}, or null"
        )
    dtype = compute_dtype(config.learner, device)
    engine_args(config.model, config.rollout, device, dtype, max_sequence_tokens(config))


def max_sequence_tokens(config: Config) -> int:
    """The longest prompt and one longest completion, of training or of an evaluation. Tokens."""
    longest = max(config.rollout.max_completion_tokens, max_eval_completion_tokens(config))
    return config.data.max_prompt_tokens + longest


def max_group_tokens(config: Config) -> int:
    """A packed group: the longest prompt once, then its longest completions. Tokens."""
    rollout = config.rollout
    return config.data.max_prompt_tokens + config.rollouts_per_group * rollout.max_completion_tokens


def snapshot_bytes(config: Config, model_path: Path, device: str) -> int:
    """Host memory of the snapshots in weight_sync.dir: two versions at once. Bytes. Raises ConfigError."""
    dtype = publish_dtype(config, device)
    shapes = read_tensor_shapes(model_path)
    tensors = ((name, shape, dtype, ITEMSIZES[dtype]) for name, shape in shapes.items())
    return NUM_SNAPSHOTS * lay_out(tensors, incarnation="", version=0).total_bytes


def _check_evaluation(config: Config) -> None:
    """Only of a run: `asyncrl eval` and `asyncrl data` take a data.eval that no training evaluates."""
    if config.data.eval and not config.eval.every:
        names = ", ".join(source.path for source in config.data.eval)
        raise ConfigError(
            f"data.eval: {names} is never used with eval.every 0; set eval.every, or leave it out (data.eval=null)"
        )


def _check_messages(config: Config) -> None:
    limit = config.stream.max_message_bytes
    for what, num_bytes in (
        ("a group of the longest completions", max_group_bytes(config)),
        ("one rank's share of a batch of such groups", max_shard_bytes(config)),
        ("an evaluation's longest completions of one prompt", max_eval_bytes(config)),
    ):
        if num_bytes > limit:
            raise ConfigError(
                f"stream.max_message_bytes: {limit} is less than the {num_bytes} bytes of {what}; raise it"
            )


def _check_folders(config: Config, *, resumes: bool) -> None:
    model_folder(config.model)
    folder = config.weight_sync.dir
    if not os.path.isdir(folder):
        raise ConfigError(f"weight_sync.dir: {folder!r} is not a folder; name an existing one")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"weight_sync.dir: {folder!r} cannot be written to; name another folder")
    if config.run.name is not None and not resumes and (run := run_path(config)).exists():
        raise exists_already(run)
