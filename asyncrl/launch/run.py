"""One run on one node: the launcher's process, which is also the coordinator's.

prepare            run directory, model (made or fetched in a subprocess), data set, reward
start              the coordinator's socket, learner ranks, rollout servers, each on its cores
watch              coordinator, children and console in one TaskGroup: the first failure ends all
end                children stopped, snapshots unlinked, whatever happened
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from asyncrl.config import Config
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.mailbox import Mailbox
from asyncrl.envs.dataset import Dataset, load_rows, load_tokenizer, tokenize
from asyncrl.envs.rewards import check_answers, resolve_reward
from asyncrl.errors import ConfigError, first_cause
from asyncrl.launch import console as run_console
from asyncrl.launch.child import ChildSpec
from asyncrl.launch.model_facts import check_length, read_vocab_size
from asyncrl.launch.processes import Processes
from asyncrl.launch.resources import Placements, available_cores, count_gpus, place_processes
from asyncrl.run_directory import RunDirectory, default_run_name
from asyncrl.stream.codec import Limits
from asyncrl.stream.sockets import Listener
from asyncrl.weight_sync.snapshot import remove_all


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that can be wrong with a configuration has been looked at once this exists."""

    config: Config
    model_path: Path
    dataset: Dataset
    placements: Placements
    device: str


async def prepare(config: Config) -> Prepared:
    """Checks reward, data and resources, and brings the model. Raises ConfigError or DataError."""
    num_gpus = count_gpus(config)
    placements = place_processes(config, cores=available_cores(), num_gpus=num_gpus)
    resolve_reward(config.reward, config.data.answer_key)
    rows = load_rows(config.data, config.seed)
    check_answers(config.reward, rows, config.data.answer_key, config.data.train)
    model_path = await fetch_model(config.model)
    check_length(model_path, config.data.max_prompt_tokens + config.rollout.max_completion_tokens)
    dataset = tokenize(rows, config.data, load_tokenizer(model_path))
    return Prepared(config, model_path, dataset, placements, "cuda" if num_gpus else "cpu")


async def fetch_model(name: str) -> Path:
    """The model's folder, made or downloaded in a subprocess: this process stays without torch."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "asyncrl.models", name, stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise ConfigError(f"model: {name!r} could not be brought here; the reason stands above")
    return Path(output.decode().splitlines()[-1])


async def run_training(config: Config, *, num_servers: int | None = None) -> Path:
    """Runs to the end and returns the run directory. Raises the first cause of failure.

    `num_servers`: how many rollout servers to start (None: as configured; 0: they connect by themselves).
    """
    if num_servers is not None:
        config = config.model_copy(
            update={"rollout": config.rollout.model_copy(update={"num_servers": num_servers})}
        )
    if config.run.name is None:
        run = config.run.model_copy(update={"name": default_run_name()})
        config = config.model_copy(update={"run": run})
    prepared = await prepare(config)
    directory = RunDirectory.create(config)
    run = f"{config.run.name}.{secrets.token_hex(4)}"
    console = Console()
    _introduce(prepared, directory, console)
    try:
        await _run(prepared, directory, run, console)
    finally:
        directory.close()
        remove_all(config.weight_sync.dir, run)
    return directory.path


async def _run(prepared: Prepared, directory: RunDirectory, run: str, console: Console) -> None:
    config = prepared.config
    limits = Limits(
        vocab_size=read_vocab_size(prepared.model_path),
        group_size=config.rollout.group_size,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_completion_tokens=config.rollout.max_completion_tokens,
        newest_version=-1,
        run=run,
        incarnation=secrets.token_hex(4),
    )
    processes = Processes(shutdown_s=config.timeouts.shutdown_s)
    async with Listener(
        config.stream.bind,
        config.stream.port,
        max_message_bytes=config.stream.max_message_bytes,
        heartbeat_s=config.timeouts.heartbeat_s,
    ) as listener:
        mailbox = Mailbox(listener, limits, max_message_bytes=config.stream.max_message_bytes)
        coordinator = Coordinator(config, prepared.dataset, mailbox, directory)
        if not config.rollout.num_servers:
            console.print(
                f"connect rollout servers: asyncrl rollout-server CONFIG --connect {mailbox.address}"
            )
        with tempfile.TemporaryDirectory(prefix="asyncrl-") as rendezvous:
            try:
                await _start_children(prepared, directory, mailbox.address, processes, Path(rendezvous))
                await _watch(coordinator, processes, console, str(config.run.name))
            finally:
                await asyncio.shield(processes.stop())


async def _start_children(
    prepared: Prepared, directory: RunDirectory, address: str, processes: Processes, rendezvous: Path
) -> None:
    roles = {"learner": prepared.placements.learner, "rollout-server": prepared.placements.rollout_servers}
    for role, placements in roles.items():
        for rank, placement in enumerate(placements):
            spec = ChildSpec(
                role=role,
                rank=rank,
                config_file=str(directory.config_file),
                model_path=str(prepared.model_path),
                address=address,
                cores=placement.cores,
                device=prepared.device,
                parent_pid=os.getpid(),
                init_method=f"file://{rendezvous}/torch",
            )
            await processes.start(spec, placement, directory.log_file(role, rank))


async def _watch(coordinator: Coordinator, processes: Processes, console: Console, title: str) -> None:
    """Until the run has ended and every child with it. Raises the first cause."""
    ending = coordinator.ending
    try:
        async with asyncio.TaskGroup() as tasks:
            shown = tasks.create_task(run_console.show(coordinator.status, title, console))
            watched = [tasks.create_task(processes.watch(child, ending)) for child in processes.children]
            await coordinator.run()
            await asyncio.wait(watched)
            shown.cancel()
    except BaseExceptionGroup as group:
        cause = first_cause(group)
        await coordinator.stop_peers(str(cause).partition("\n")[0])
        raise cause from None


def _introduce(prepared: Prepared, directory: RunDirectory, console: Console) -> None:
    dataset = prepared.dataset
    console.print(f"run {directory.path}", soft_wrap=True)
    dropped = f", {dataset.num_too_long} dropped as too long" if dataset.num_too_long else ""
    console.print(f"{len(dataset)} prompts from {dataset.source}{dropped}; model {prepared.model_path}")


def run_until_done(config: Config, *, num_servers: int | None = None) -> Path:
    """`run_training` in an event loop of its own; SIGTERM ends it as Ctrl-C does (KeyboardInterrupt)."""

    async def run() -> Path:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await run_training(config, num_servers=num_servers)

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
