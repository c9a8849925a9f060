"""`asyncrl check`: every number that follows from a configuration, computed and shown; nothing is started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asyncrl.config import Config
from asyncrl.envs.dataset import load_rows
from asyncrl.envs.rewards import check_answers, resolve_reward
from asyncrl.errors import ConfigError
from asyncrl.launch.model_facts import count_parameters
from asyncrl.launch.resources import available_cores, count_gpus, place_processes
from asyncrl.models.source import model_is_ready, resolve_model
from asyncrl.weight_sync.snapshot import bytes_free

BYTES_A_TOKEN = 13
"""On the wire: id 4, log-prob 4, version 4, mask 1."""
TINY_PARAMETERS = 410_000


def check(config: Config) -> list[tuple[str, str]]:
    """(what, value) rows in reading order. Raises ConfigError or DataError for what cannot run."""
    resolve_reward(config.reward, config.data.answer_key)
    rows = load_rows(config.data, config.seed)
    check_answers(config.reward, rows, config.data.answer_key, config.data.train)
    return [
        *_batch(config, len(rows)),
        *_pacing(config),
        *_stream(config),
        *_weights(config),
        *_processes(config),
    ]


def _batch(config: Config, num_rows: int) -> Iterator[tuple[str, str]]:
    rollout, learner = config.rollout, config.learner
    group_tokens = config.data.max_prompt_tokens + rollout.group_size * rollout.max_completion_tokens
    batch_tokens = learner.prompts_per_batch * group_tokens
    fit = max(1, learner.max_tokens_per_microbatch // group_tokens)
    per_rank = -(-learner.prompts_per_batch // learner.num_ranks)
    needed = learner.prompts_per_batch * learner.max_versions
    yield "data", f"{config.data.train}: {num_rows} rows, {needed / num_rows:.2f} epochs in the run"
    yield (
        "a batch",
        (
            f"{learner.prompts_per_batch} prompts x {rollout.group_size} = "
            f"{learner.prompts_per_batch * rollout.group_size} trajectories, at most {batch_tokens} packed tokens"
        ),
    )
    yield (
        "a group",
        (
            f"at most {group_tokens} packed tokens (the prompt once)"
            + (
                ""
                if group_tokens <= learner.max_tokens_per_microbatch
                else ", over the microbatch budget: alone"
            )
        ),
    )
    yield (
        "microbatches",
        f"at most {-(-per_rank // fit)} a rank of {learner.max_tokens_per_microbatch} tokens",
    )
    yield "the run", f"{learner.max_versions} versions, {needed} prompts"


def _pacing(config: Config) -> Iterator[tuple[str, str]]:
    batch, bound = config.learner.prompts_per_batch, config.max_staleness
    yield "staleness", f"at most {bound} versions a trained token ({config.over_age}); 0 is synchronous"
    yield "groups outstanding", f"at most {(bound + 1) * batch} ahead of what the slowest lead allows"
    credits = config.rollout.max_groups_in_flight
    if credits == "auto":
        credits = f"at most {max(1, config.rollout.max_num_seqs // config.rollout.group_size)} (auto)"
    yield "groups in flight", f"{credits} a server"


def _stream(config: Config) -> Iterator[tuple[str, str]]:
    rollout = config.rollout
    group_bytes = 4 * config.data.max_prompt_tokens + (
        BYTES_A_TOKEN * rollout.group_size * rollout.max_completion_tokens
    )
    port = config.stream.port or "a free port"
    yield "stream", f"{config.stream.bind}, {port}; a group is at most {group_bytes} bytes and its text"
    if group_bytes > config.stream.max_message_bytes:
        raise ConfigError(
            f"stream.max_message_bytes: {config.stream.max_message_bytes} is less than the {group_bytes} bytes "
            "of one group; raise it"
        )


def _weights(config: Config) -> Iterator[tuple[str, str]]:
    free = bytes_free(config.weight_sync.dir)
    if not model_is_ready(config.model):
        if config.model != "tiny":
            yield "model", f"{config.model}: not here yet; its size shows once it is"
            return
        num_parameters = TINY_PARAMETERS
    else:
        num_parameters = count_parameters(Path(resolve_model(config.model)))
    on_gpu = bool(count_gpus(config))
    dtype = next((d for d in (config.weight_sync.dtype, config.learner.dtype) if d != "auto"), None)
    itemsize = 4 if (dtype or ("bfloat16" if on_gpu else "float32")) == "float32" else 2
    needed = 2 * num_parameters * itemsize
    yield "model", f"{config.model}: {num_parameters / 1e6:.2f} M parameters"
    yield (
        "snapshots",
        f"two at once: {needed / 1e6:.1f} MB in {config.weight_sync.dir}, {free / 1e6:.0f} MB free",
    )
    yield (
        "learner memory",
        f"{16 * num_parameters / 1e6:.1f} MB of weights, gradients and moments over all ranks",
    )
    if needed > free:
        raise ConfigError(
            f"weight_sync.dir: {config.weight_sync.dir} has {free} bytes free and two snapshots need {needed}; "
            "name a folder with more room"
        )


def _processes(config: Config) -> Iterator[tuple[str, str]]:
    placements = place_processes(config, cores=available_cores(), num_gpus=count_gpus(config))
    roles = {"learner": placements.learner, "rollout-server": placements.rollout_servers}
    for role, places in roles.items():
        for rank, place in enumerate(places):
            cores = ",".join(map(str, place.cores))
            gpus = f", GPUs {','.join(map(str, place.gpus))}" if place.gpus else ""
            yield f"{role}-{rank}", f"cores {cores}{gpus}"
    yield "coordinator", "in the launcher's process, wherever the system puts it"
