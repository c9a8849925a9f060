"""`asyncrl eval CONFIG [--checkpoint FOLDER]`: a model's numbers on data.eval. One engine, no learner.

Rollouts, rewards and numbers are those of the evaluations of a run; the model reaches the engine the same way,
as a snapshot, here of a Hugging Face folder. What the engine and the rewards print goes to a log, which a failure
keeps: stdout is for the numbers.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from asyncrl.config import Config
from asyncrl.coordinator.eval_side import eval_sampling
from asyncrl.dtypes import publish_dtype
from asyncrl.envs.dataset import Dataset, load_tokenizer, tokenize
from asyncrl.envs.env import Env, Rewards, SingleTurnEnv
from asyncrl.envs.eval_report import EvalReport, evaluate, num_eval_prompts
from asyncrl.envs.order import eval_seed
from asyncrl.errors import ConfigError, EngineError, first_cause
from asyncrl.launch.logs import output_to, shown_end
from asyncrl.launch.model_facts import check_length
from asyncrl.launch.preflight import check_engine, check_rewards, load_eval_rows, max_sequence_tokens
from asyncrl.launch.prepare import fetch_model, fetch_reward_models, prompts_found
from asyncrl.launch.resources import visible_gpus
from asyncrl.launch.server_process import make_engine, rewards_of
from asyncrl.rollout_server.engine import Engine
from asyncrl.rollout_server.group_runner import run_group
from asyncrl.stream.messages import Lease
from asyncrl.types import TrajectoryGroup
from asyncrl.weight_sync.manifest import Manifest, lay_out
from asyncrl.weight_sync.shm import ShmTransport
from asyncrl.weight_sync.snapshot import SnapshotWriter, remove_all

INCARNATION = "eval"
VERSION = 0
"""What the folder's weights are called while they are evaluated."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A model, and its numbers."""

    model: str
    report: EvalReport
    seconds: float
    """Of generating and scoring."""
    num_filtered: int
    """Rows of data.eval that a source's `filter` left out."""
    num_too_long: int
    """Rows whose prompt exceeds `data.max_prompt_tokens`."""

    def as_json(self) -> dict[str, object]:
        return {
            "model": self.model,
            "num_prompts": self.report.num_prompts,
            "num_left_out": self.report.num_left_out,
            "num_filtered": self.num_filtered,
            "num_too_long": self.num_too_long,
            "seconds": self.seconds,
            "metrics": self.report.metrics,
        }


def evaluate_model(config: Config, folder: Path | None = None) -> Evaluated:
    """Evaluates the model in `folder` (Hugging Face format), or the config's. Raises the cause of a failure.

    Whatever happens, the engine has ended then, and no snapshot is left.
    """
    if not config.data.eval:
        raise ConfigError(
            "data.eval: names nothing to evaluate; name a data set there: data.eval=my_test.jsonl"
        )
    run_id = f"eval.{secrets.token_hex(4)}"
    log = Path(tempfile.gettempdir()) / f"asyncrl-{run_id}.log"

    async def run() -> Evaluated:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        prepared = await _prepare(config, folder)
        _say(f"starting the engine (about a minute); its log is {log}")
        with output_to(log):
            return await _evaluate(config, prepared, run_id)

    log_is_read = False
    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    except EngineError as error:
        log_is_read = True
        raise EngineError(f"{shown_end(log)}\n{error}") from error
    finally:
        remove_all(config.weight_sync.dir, run_id)  # threads have ended too: nobody writes one any more
        if not log_is_read:
            log.unlink(missing_ok=True)


def print_table(evaluated: Evaluated) -> None:
    """To stderr: stdout is the JSON's."""
    table = Table("metric", "value")
    for name, value in evaluated.report.metrics.items():
        table.add_row(name, f"{value:.4f}")
    console = Console(stderr=True)
    console.print(table)
    console.print(
        f"{evaluated.model}: {evaluated.report.headline()}, {evaluated.seconds:.0f} s",
        markup=False,
        soft_wrap=True,
    )


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What is evaluated, before an engine is started."""

    folder: Path
    dataset: Dataset
    device: str
    """cpu | cuda"""


async def _prepare(config: Config, folder: Path | None) -> _Prepared:
    """Everything that can be wrong without an engine. Raises ConfigError or DataError."""
    device = "cuda" if visible_gpus(config) else "cpu"
    check_engine(config, device)
    rows = load_eval_rows(config)
    check_rewards(config, rows)
    if await fetch_reward_models(config):
        check_rewards(config, rows)
    folder = folder or await fetch_model(config.model)
    check_length(folder, max_sequence_tokens(config))
    dataset = tokenize(rows, config.data, load_tokenizer(folder))
    _say(f"{prompts_found(dataset, num_eval_prompts(len(dataset), config))}; model {folder}")
    return _Prepared(folder, dataset, device)


async def _evaluate(config: Config, prepared: _Prepared, run_id: str) -> Evaluated:
    folder, dataset, device = prepared.folder, prepared.dataset, prepared.device
    env = SingleTurnEnv(load_tokenizer(folder))
    writer = SnapshotWriter(config.weight_sync.dir, run_id)
    # Before the engine, which takes a minute to start: weights may be missing, or the room for them.
    manifest = await asyncio.to_thread(_write_snapshot, writer, folder, publish_dtype(config, device))
    engine = make_engine(config, str(folder), device)
    try:
        async with rewards_of(config) as rewards:
            await engine.start()
            await _serve(engine, writer, manifest)
            start_s = time.monotonic()
            groups = await _run_prompts(engine, config, dataset, env, rewards)
            seconds = time.monotonic() - start_s
    finally:
        await engine.close()
    report = evaluate([(dataset[group.ordinal].row, group) for group in groups], config)
    return Evaluated(str(folder), report, seconds, dataset.num_filtered, dataset.num_too_long)


def _say(text: str) -> None:
    """To stderr: stdout is the JSON's."""
    print(text, file=sys.stderr, flush=True)


async def _serve(engine: Engine, writer: SnapshotWriter, manifest: Manifest) -> None:
    """Brings the snapshot into the engine, as every version comes. Its file is needed no longer then."""
    staged = await ShmTransport().stage(writer.path(manifest), manifest)
    await engine.pause()
    await engine.apply(staged, manifest)
    await engine.resume()
    writer.unlink(manifest.incarnation, manifest.version)


def _write_snapshot(writer: SnapshotWriter, folder: Path, dtype: str) -> Manifest:
    """The model's parameters as transformers loads and names them, which is what a learner publishes."""
    import torch

    from asyncrl.models.weights import load_causal_lm

    parameters = dict(load_causal_lm(folder, dtype=getattr(torch, dtype)).named_parameters())
    itemsize = getattr(torch, dtype).itemsize
    layout = lay_out(
        ((name, tuple(p.shape), dtype, itemsize) for name, p in parameters.items()), INCARNATION, VERSION
    )
    writer.create(layout)
    for entry in layout.tensors:
        writer.write_rows(entry, 0, parameters[entry.name])
    return writer.finish(writer.digest(layout.tensors))


async def _run_prompts(
    engine: Engine, config: Config, dataset: Dataset, env: Env, rewards: Rewards
) -> list[TrajectoryGroup]:
    """Every prompt's group, in the order of the data set. Raises EngineError when nothing moves any more."""
    num_prompts = num_eval_prompts(len(dataset), config)
    room = asyncio.Semaphore(max(1, 2 * engine.max_concurrent_requests // config.eval.num_samples))
    groups: dict[int, TrajectoryGroup] = {}

    async def run_prompt(row_index: int) -> None:
        async with room:
            kept = dataset[row_index]
            seeds = [
                eval_seed(config.seed, VERSION, row_index, sample)
                for sample in range(config.eval.num_samples)
            ]
            lease = Lease(row_index, 0, seeds, kept.row)
            groups[row_index] = await run_group(
                lease, kept.token_ids, env=env, engine=engine, rewards=rewards, sampling=eval_sampling(config)
            )

    async def watch() -> None:
        limit_s = config.timeouts.lease_s + config.timeouts.reward_s
        seen = (-1, -1)
        while (now := (engine.statistics().num_steps, rewards.num_finished)) != seen:
            seen = now
            await asyncio.sleep(limit_s)
        raise EngineError(
            f"no step of the engine and no finished reward for {limit_s:g} s (timeouts.lease_s + reward_s), with "
            f"{len(groups)} of {num_prompts} prompts done"
        )

    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            async with asyncio.TaskGroup() as prompts:
                for row_index in range(num_prompts):
                    prompts.create_task(run_prompt(row_index))
            watching.cancel()
    except BaseExceptionGroup as group:
        raise first_cause(group) from None
    return [groups[row_index] for row_index in range(num_prompts)]
