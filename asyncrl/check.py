"""`asyncrl check`: every number that follows from a configuration, computed and shown; nothing is started."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config import Config, own_options
from asyncrl.config.learner import LoraTable
from asyncrl.envs.dataset import Dataset
from asyncrl.envs.eval_report import num_eval_prompts
from asyncrl.envs.mixture import shares
from asyncrl.envs.reward_checks import models_to_fetch
from asyncrl.envs.supervised import SupervisedDataset, max_row_tokens
from asyncrl.launch.model_facts import adapted_layers, read_tensor_shapes
from asyncrl.launch.preflight import (
    Examined,
    check_config,
    check_model,
    max_group_bytes,
    max_group_tokens,
    max_shard_bytes,
    snapshot_bytes,
)
from asyncrl.launch.prepare import supervised_found
from asyncrl.launch.resources import Placements
from asyncrl.models.source import absence, model_is_ready, resolve_model
from asyncrl.weight_sync.snapshot import bytes_free

Rows = Iterator[tuple[str, str]]

BYTES_A_PARAMETER = {"adamw": 16, "sgd": 8}
"""Of the learner: weight 4, gradient 4, AdamW's two moments 8."""
BYTES_A_WEIGHT = 4
"""Of a model that is not trained."""


def check(config: Config) -> list[tuple[str, str]]:
    """(what, value) rows in reading order. Raises ConfigError or DataError for what `prepare` refuses too."""
    examined = check_config(config)
    model_path = resolve_model(config.model) if model_is_ready(config.model) else None
    dataset, eval_dataset, supervised = (
        check_model(examined, model_path) if model_path is not None else (None, None, None)
    )
    return [
        *_data(config, examined, dataset, eval_dataset),
        *_supervised(config, supervised),
        *_reward_models(config),
        *_algorithm(config),
        *_batch(config),
        *_pacing(config),
        *_stream(config),
        *_model(examined, model_path),
        *_processes(examined.placements),
    ]


def _data(config: Config, examined: Examined, dataset: Dataset | None, eval_dataset: Dataset | None) -> Rows:
    if dataset is None or eval_dataset is None:
        sizes = [len(rows) for rows in examined.rows]
        names = ", ".join(rows.name for rows in examined.rows)
        yield "prompts", f"{sum(sizes)} from {names}; tokens are counted once the model is here"
    else:
        sizes = dataset.sizes
        yield "prompts", _prompts(dataset, config.data.max_prompt_tokens)
        for counts in dataset.counts if len(dataset.parts) > 1 else ():
            yield "", f"{counts.share:.1%} {counts.name}: {counts.num_kept} of {counts.num_rows} rows kept"
        if len(eval_dataset):
            yield "evaluation", _prompts(eval_dataset, config.data.max_prompt_tokens)
            yield (
                "",
                f"{num_eval_prompts(len(eval_dataset), config)} prompts x {config.eval.num_samples} at temperature "
                f"{config.eval.temperature:g}: before training, every {config.eval.every} versions, at the end",
            )
    needed = config.learner.prompts_per_batch * config.learner.max_versions
    yield (
        "the run",
        f"{config.learner.max_versions} versions, {needed} prompts, {_epochs(config, sizes, needed)}",
    )


def _supervised(config: Config, dataset: SupervisedDataset | None) -> Rows:
    if not config.data.supervised:
        return
    ptx, learner = config.algorithm.loss.ptx, config.learner
    if dataset is None:
        yield (
            "supervised",
            f"{', '.join(source.path for source in config.data.supervised)}; counted with the model",
        )
        return
    yield "supervised", f"{supervised_found(dataset)}; at most {max_row_tokens(config)} tokens a row"
    needed = learner.max_versions * learner.minibatches * learner.epochs * ptx.rows_per_minibatch
    parts = shares(dataset.sizes, [source.weight for source in config.data.supervised])
    epochs = max(needed * part / size for part, size in zip(parts, dataset.sizes, strict=True))
    yield (
        "",
        f"{ptx.coef:g} x their cross entropy in every optimizer step, {ptx.rows_per_minibatch} rows each: {needed} "
        f"rows, {epochs:.2f} epochs",
    )


def _epochs(config: Config, sizes: list[int], needed: int) -> str:
    """Of the source that is repeated most often, as `training/epoch`; with weights, of the other end too."""
    parts = shares(sizes, [source.weight for source in config.data.train])
    epochs = [needed * part / size for part, size in zip(parts, sizes, strict=True)]
    least = "" if max(epochs) - min(epochs) < 0.01 else f" (of the source least drawn, {min(epochs):.2f})"
    return f"{max(epochs):.2f} epochs{least}"


def _prompts(dataset: Dataset, max_tokens: int) -> str:
    filtered = f"{dataset.num_filtered} filtered, " if dataset.num_filtered else ""
    return (
        f"{len(dataset)} kept from {dataset.source}, {filtered}{dataset.num_too_long} dropped as longer than "
        f"{max_tokens} tokens; the longest kept has {dataset.prompt_lengths.max()}"
    )


def _reward_models(config: Config) -> Rows:
    for name in models_to_fetch(config):
        yield (
            "reward",
            f"{name}: {absence(name, 'reward')}; it is checked once `asyncrl train` has brought it",
        )


def _algorithm(config: Config) -> Rows:
    algorithm = config.algorithm
    preset = "" if algorithm.preset is None else f", with {algorithm.preset}'s conventions"
    yield "algorithm", f"{algorithm.type}{preset}: {', '.join(algorithm.stages)}"
    if changed := own_options(algorithm):
        yield "", "not the recipe's own: " + ", ".join(f"{key} {value}" for key, value in changed.items())
    if config.num_greedy:
        yield (
            "",
            f"{config.num_greedy} greedy rollout of every prompt besides, the baseline: it does not train",
        )


def _batch(config: Config) -> Rows:
    learner, group_size = config.learner, config.rollout.group_size
    num_prompts, budget = learner.prompts_per_batch, learner.max_tokens_per_microbatch
    group_tokens = max_group_tokens(config)
    fit = max(1, budget // group_tokens)
    num_microbatches = math.ceil(math.ceil(num_prompts / learner.minibatches / learner.num_data_ranks) / fit)
    alone = "" if group_tokens <= budget else ", over the microbatch budget: a microbatch of its own"
    yield (
        "a batch",
        f"{num_prompts} prompts x {group_size} = {num_prompts * group_size} trajectories, at most "
        f"{num_prompts * group_tokens} packed tokens",
    )
    yield "a group", f"at most {group_tokens} packed tokens (the prompt once){alone}"
    yield (
        "optimizer steps",
        f"{learner.minibatches * learner.epochs} a version: {learner.minibatches} mini-batches x "
        f"{learner.epochs} epochs",
    )
    a_rank = "a rank" if learner.minibatches == 1 else "a rank and mini-batch"
    yield "microbatches", f"about {num_microbatches} {a_rank} at full length, of {budget} tokens"


def _pacing(config: Config) -> Rows:
    bound, rollout = config.max_staleness, config.rollout
    yield "staleness", f"at most {bound} versions a trained token ({config.over_age}); 0 is synchronous"
    yield (
        "groups outstanding",
        f"at most {(bound + 1) * config.learner.prompts_per_batch}: leased or finished, in no batch yet",
    )
    in_flight, num_prompts = rollout.max_groups_in_flight, config.learner.prompts_per_batch
    most = max(1, rollout.max_num_seqs // config.rollouts_per_group) if in_flight == "auto" else in_flight
    shown = f"at most {most} (auto: what the KV cache holds)" if in_flight == "auto" else in_flight
    yield "groups in flight", f"{shown} a server, {rollout.num_servers} servers from here"
    if bound and most * max(1, rollout.num_servers) > num_prompts:
        yield (
            "",
            f"more than a batch ({num_prompts}): what is generated beyond one waits and grows older; "
            "rollout.max_groups_in_flight limits it",
        )


def _stream(config: Config) -> Rows:
    stream = config.stream
    yield "port", f"{stream.bind}, {stream.port or 'a free port'}"
    yield (
        "messages",
        f"a group of at most {max_group_bytes(config)} bytes, a rank's batch of {max_shard_bytes(config)}, "
        f"besides text; the limit is {stream.max_message_bytes}",
    )


def _model(examined: Examined, model_path: Path | None) -> Rows:
    config = examined.config
    if model_path is None:
        yield (
            "model",
            f"{config.model}: {absence(config.model)}; its sizes show once `asyncrl train` has brought it",
        )
        return
    num_parameters = _num_parameters(model_path)
    snapshots = snapshot_bytes(config, model_path, examined.device)
    free, folder = bytes_free(config.weight_sync.dir), config.weight_sync.dir
    bytes_a_parameter = BYTES_A_PARAMETER[config.learner.optimizer]
    yield "model", f"{config.model}: {num_parameters / 1e6:.2f} M parameters"
    yield "snapshots", f"two at once: {snapshots / 1e6:.1f} MB in {folder}, {free / 1e6:.0f} MB free"
    lora, algorithm = config.learner.lora, config.algorithm
    if lora is None:
        learner_bytes = bytes_a_parameter * _num_held(config, model_path)
        held = "weights, gradients and moments"
    else:
        num_trained = config.learner.replicas * _num_adapter_parameters(model_path, lora)
        learner_bytes = BYTES_A_WEIGHT * _num_held(config, model_path) + bytes_a_parameter * num_trained
        held = "weights, and gradients and moments of the adapters,"
    yield "learner memory", f"{learner_bytes / 1e6:.1f} MB of {held} over all ranks"
    if algorithm.needs_reference and lora is not None and algorithm.reference.model is None:
        yield "reference memory", "none: it is the policy without its adapters"
    elif algorithm.needs_reference:
        yield from _besides(
            "reference", algorithm.reference.model, examined, model_path, BYTES_A_WEIGHT, "weights"
        )
    if algorithm.critic is not None and not algorithm.critic.shared:
        what = "weights, gradients and moments"
        yield from _besides("critic", algorithm.critic.model, examined, model_path, bytes_a_parameter, what)
    yield from _checkpoints(config, model_path)


def _checkpoints(config: Config, model_path: Path) -> Rows:
    """Weights and moments, float32, without gradients."""
    checkpoint, algorithm, lora = config.checkpoint, config.algorithm, config.learner.lora
    if not checkpoint.every:
        yield "checkpoints", "none (checkpoint.every 0): a run that is interrupted starts anew"
        return
    of_policy = _num_parameters(model_path)
    num_trained = of_policy if lora is None else _num_adapter_parameters(model_path, lora)
    num_bytes = (BYTES_A_PARAMETER[config.learner.optimizer] - BYTES_A_WEIGHT) * num_trained
    if (critic := algorithm.critic) is not None and not critic.shared:
        is_here = critic.model is not None and model_is_ready(critic.model)
        of_critic = _num_parameters(resolve_model(critic.model)) if is_here and critic.model else of_policy
        num_bytes += (BYTES_A_PARAMETER[config.learner.optimizer] - BYTES_A_WEIGHT) * of_critic
    if algorithm.reference.refresh_every:
        num_bytes += BYTES_A_WEIGHT * of_policy
    most = (checkpoint.keep + 1) * num_bytes
    yield (
        "checkpoints",
        f"every {checkpoint.every} versions {num_bytes / 1e6:.1f} MB; with checkpoint.keep {checkpoint.keep} at most "
        f"{most / 1e6:.1f} MB in {config.run.dir}",
    )


def _besides(
    role: str, name: str | None, examined: Examined, policy: Path, bytes_a_parameter: int, what: str
) -> Rows:
    """A model that the ranks hold besides the policy. None: one of its size."""
    if name is not None and not model_is_ready(name):
        known = absence(name, f"algorithm.{role}.model")
        yield f"{role} memory", f"{name}: {known}; its size shows once `asyncrl train` has brought it"
        return
    num_held = _num_held(examined.config, policy if name is None else resolve_model(name))
    yield f"{role} memory", f"{bytes_a_parameter * num_held / 1e6:.1f} MB of {what} over all ranks"


def _num_adapter_parameters(model_path: Path, lora: LoraTable) -> int:
    """rank x (inputs + outputs) of each matrix that gets an adapter."""
    return lora.rank * sum(sum(shape) for shape in adapted_layers(model_path, lora).values())


def _num_held(config: Config, model_path: Path) -> int:
    """Parameters of a model that all learner ranks hold together: each copy, and whole in each tensor rank what is no
    matrix of a block."""
    learner = config.learner
    shapes = read_tensor_shapes(model_path).items()
    cut = sum(math.prod(shape) for name, shape in shapes if ".layers." in name and len(shape) == 2)
    whole = _num_parameters(model_path) - cut
    return learner.replicas * (cut + learner.tensor_parallel_size * whole)


def _num_parameters(model_path: Path) -> int:
    return sum(math.prod(shape) for shape in read_tensor_shapes(model_path).values())


def _processes(placements: Placements) -> Rows:
    roles = {"learner": placements.learner, "rollout-server": placements.rollout_servers}
    for role, places in roles.items():
        for rank, place in enumerate(places):
            gpus = f", GPUs {','.join(place.gpus)}" if place.gpus else ""
            yield f"{role}-{rank}", f"cores {','.join(map(str, place.cores))}{gpus}"
    yield "coordinator", "in the launcher's process, wherever the system puts it"
