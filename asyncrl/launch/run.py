"""One run on one node: the launcher's process, which is also the coordinator's.

prepare    run directory, model (made or fetched in a subprocess), data set, reward
start      the coordinator's socket, then learner ranks and rollout servers, each on its cores
watch      coordinator, children and console in one TaskGroup: the first failure ends all
end        children stopped, snapshots unlinked, whatever happened
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from asyncrl.config import Config
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.mailbox import Mailbox
from asyncrl.envs.eval_report import num_eval_prompts
from asyncrl.errors import first_cause, last_line
from asyncrl.launch.child import ChildSpec
from asyncrl.launch.console import show
from asyncrl.launch.model_facts import read_hidden_size
from asyncrl.launch.prepare import Prepared, message_limits, prepare, prompts_found, supervised_found
from asyncrl.launch.processes import Processes
from asyncrl.launch.resources import ROLES
from asyncrl.launch.resume import (
    Resumption,
    check_data,
    evaluated_versions,
    find_resumption,
    open_run_directory,
)
from asyncrl.model_card import write_model_card
from asyncrl.run_directory import RunDirectory, default_run_name
from asyncrl.stream.sockets import Listener
from asyncrl.trackers.delivery import Trackers
from asyncrl.weight_sync.snapshot import remove_all


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a coordinator can be met, and what its peers need besides the config."""

    address: str
    run_directory: Path
    model_path: Path
    checkpoint: Path | None
    """That the learner goes on from."""


def run_until_done(
    config: Config,
    *,
    start: Collection[str] = ROLES,
    on_listening: Callable[[Listening], None] | None = None,
    resume: bool = False,
) -> Path:
    """Runs to the end and returns the run directory. Raises the first cause of failure.

    `start`: the roles whose processes this one starts; the others connect by themselves. `resume`: the run directory
    exists, and the run goes on from its newest checkpoint. Ctrl-C ends the run with
    KeyboardInterrupt, SIGTERM with SystemExit(143), once everything has ended. The caller's own handler of SIGTERM is
    back then: asyncio takes it away.
    """
    own_handler = signal.getsignal(signal.SIGTERM)

    async def run() -> Path:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await run_training(config, start=start, on_listening=on_listening, resume=resume)

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:  # Ctrl-C is KeyboardInterrupt already
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        if own_handler is not None:  # None: set by C code, and out of reach
            signal.signal(signal.SIGTERM, own_handler)


async def run_training(
    config: Config,
    *,
    start: Collection[str],
    on_listening: Callable[[Listening], None] | None,
    resume: bool,
) -> Path:
    """`run_until_done` inside an event loop."""
    resumption = find_resumption(config) if resume else None
    if config.run.name is None:
        named = config.run.model_copy(update={"name": default_run_name()})
        config = config.model_copy(update={"run": named})
    prepared = await prepare(config, start=start, resumes=resume)
    if resumption is not None:
        check_data(resumption, prepared.dataset)
    await asyncio.sleep(0)  # a Ctrl-C that came meanwhile lands here, before anything is made
    directory = open_run_directory(config, resumption)
    launch = Launch(prepared, directory, start=start, on_listening=on_listening, resumption=resumption)
    try:
        await launch.run()
    finally:
        directory.close()
        remove_all(config.weight_sync.dir, launch.run_id)
    if directory.model.is_dir():  # learner.export, and the learner shares this node's files
        write_model_card(directory.path, directory.model)
    return directory.path


class Launch:
    """The processes of one run, from the first to the last."""

    def __init__(
        self,
        prepared: Prepared,
        directory: RunDirectory,
        *,
        start: Collection[str],
        on_listening: Callable[[Listening], None] | None,
        resumption: Resumption | None = None,
    ) -> None:
        self.run_id = f"{prepared.config.run.name}.{secrets.token_hex(4)}"
        self._prepared = prepared
        self._config = prepared.config
        self._directory = directory
        self._start = start
        self._on_listening = on_listening
        self._resumption = resumption
        self._console = Console()
        self._processes = Processes(shutdown_s=prepared.config.timeouts.shutdown_s)

    async def run(self) -> None:
        """Raises the first cause of failure; nothing that was started is left then, either."""
        self._introduce()
        limits = message_limits(self._config, self._prepared.model_path)
        limits.run, limits.incarnation, limits.newest_version = self.run_id, secrets.token_hex(4), -1
        stream = self._config.stream
        async with Listener(
            stream.bind,
            stream.port,
            max_message_bytes=stream.max_message_bytes,
            heartbeat_s=self._config.timeouts.heartbeat_s,
        ) as listener:
            mailbox = Mailbox(listener, limits, max_message_bytes=stream.max_message_bytes)
            coordinator = Coordinator(
                self._config,
                self._prepared.dataset,
                mailbox,
                self._directory,
                eval_dataset=self._prepared.eval_dataset,
                hidden_size=read_hidden_size(self._prepared.model_path),
                resumed=self._resumption.state if self._resumption is not None else None,
                evaluated=evaluated_versions(self._directory.path),
            )
            self._announce(mailbox.address)
            async with Trackers(
                self._config,
                self._directory.path,
                note=coordinator.status.note,
                counts=coordinator.status.counts,
                say=self._say,
                first_version=0 if self._resumption is None else self._resumption.checkpoint.version,
            ) as trackers:
                self._directory.observers.append(trackers)
                await self._run_children(coordinator, mailbox.address)

    async def _run_children(self, coordinator: Coordinator, address: str) -> None:
        with tempfile.TemporaryDirectory(prefix="asyncrl-") as rendezvous:
            try:
                await self._start_children(address, f"file://{rendezvous}/torch")
                await self._watch(coordinator)
            except asyncio.CancelledError:
                self._say(f"ending what was started (at most {self._config.timeouts.shutdown_s:g} s)")
                raise
            finally:
                await asyncio.shield(self._processes.stop())

    @property
    def _checkpoint(self) -> Path | None:
        return None if self._resumption is None else self._resumption.checkpoint.folder

    def _introduce(self) -> None:
        self._say(f"run {self._directory.path}")
        if self._resumption is not None:
            for note in self._resumption.notes:
                self._say(note)
            self._say(f"goes on at version {self._resumption.checkpoint.version}")
        self._say(f"{prompts_found(self._prepared.dataset)}; model {self._prepared.model_path}")
        if len(self._prepared.eval_dataset):
            dataset = self._prepared.eval_dataset
            num_used = num_eval_prompts(len(dataset), self._config)
            self._say(f"evaluation: {prompts_found(dataset, num_used)}")
        if len(self._prepared.supervised):
            self._say(f"supervised: {supervised_found(self._prepared.supervised)}")
        if self._start:
            self._say(
                f"starting {' and '.join(self._start)} (about a minute); logs in {self._directory.logs}"
            )

    def _announce(self, address: str) -> None:
        if self._on_listening is not None:
            self._on_listening(
                Listening(address, self._directory.path, self._prepared.model_path, self._checkpoint)
            )
        if "rollout-server" not in self._start or not self._config.rollout.num_servers:
            self._say(f"connect rollout servers: asyncrl rollout-server CONFIG --connect {address}")

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    async def _start_children(self, address: str, init_method: str) -> None:
        placements = self._prepared.placements
        placed = {"learner": placements.learner, "rollout-server": placements.rollout_servers}
        for role in self._start:
            for rank, placement in enumerate(placed[role]):
                spec = ChildSpec(
                    role=role,
                    rank=rank,
                    config_file=str(self._directory.config_file),
                    model_path=str(self._prepared.model_path),
                    address=address,
                    cores=placement.cores,
                    device=self._prepared.device,
                    parent_pid=os.getpid(),
                    init_method=init_method,
                    checkpoint=str(self._checkpoint or ""),
                )
                await self._processes.start(spec, placement, self._directory.log_file(role, rank))

    async def _watch(self, coordinator: Coordinator) -> None:
        """Until the run has ended and every child with it. Raises the first cause."""
        try:
            async with asyncio.TaskGroup() as display:
                shown = display.create_task(
                    show(coordinator.status, str(self._config.run.name), self._console)
                )
                try:
                    await self._serve(coordinator)
                finally:
                    shown.cancel()  # after everybody's last notes
        except BaseExceptionGroup as group:
            cause = first_cause(group)
            await coordinator.stop_peers(last_line(cause))
            raise cause from None

    async def _serve(self, coordinator: Coordinator) -> None:
        async with asyncio.TaskGroup() as tasks:
            watched = [
                tasks.create_task(self._processes.watch(child, coordinator.ending))
                for child in self._processes.children
            ]
            # A task like the others, so that the group's first exception is the first in time.
            await tasks.create_task(coordinator.run())
            if watched:
                await asyncio.wait(watched, timeout=self._config.timeouts.shutdown_s)
            for task in watched:  # whoever is still there is ended by `run`
                task.cancel()
