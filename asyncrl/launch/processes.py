"""The children of the launcher: started with their log files, watched, and ended together."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from asyncrl.errors import PeerLost
from asyncrl.launch.child import ChildSpec
from asyncrl.launch.logs import shown_end
from asyncrl.launch.resources import Placement

TRACKER_TIMEOUT_S = 5.0
"""A resource tracker that still runs so long after its processes is killed."""


@dataclass(frozen=True, slots=True)
class Child:
    """One process that the launcher started."""

    name: str
    process: asyncio.subprocess.Process
    log_file: Path


class Processes:
    """Owns the children. `stop` ends them all, whatever state they are in."""

    def __init__(self, *, shutdown_s: float) -> None:
        self._shutdown_s = shutdown_s
        self.children: list[Child] = []

    async def start(self, spec: ChildSpec, placement: Placement, log_file: Path) -> Child:
        """Starts one child in a process group of its own: Ctrl-C reaches the launcher alone."""
        with log_file.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "asyncrl.launch.child",
                msgspec.json.encode(spec).decode(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | placement.environment(),
                start_new_session=True,
            )
        child = Child(f"{spec.role}-{spec.rank}", process, log_file)
        self.children.append(child)
        return child

    async def watch(self, child: Child, ending: asyncio.Event) -> None:
        """Returns when the child ends well after `ending` is set. Raises PeerLost with its last words."""
        code = await child.process.wait()
        if code == 0 and ending.is_set():
            return
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines = child.log_file.read_text(errors="replace").splitlines()
        last_words = next((line for line in reversed(lines) if line.startswith("asyncrl ")), "")
        raise PeerLost(f"{shown_end(child.log_file)}\n{child.name} {how}. {last_words}".rstrip())

    async def stop(self) -> None:
        """Asks every child to end, kills what is left after the deadline, children of children included."""
        running = [child for child in self.children if child.process.returncode is None]
        for child in running:
            with suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGTERM)  # it knows how to end its own children
        if running:
            ends = [asyncio.ensure_future(child.process.wait()) for child in running]
            await asyncio.wait(ends, timeout=self._shutdown_s)
        await asyncio.to_thread(_kill_groups, {child.process.pid for child in self.children})
        for child in self.children:
            await child.process.wait()


def _kill_groups(group_ids: set[int]) -> None:
    """Ends every process of these groups.

    Python's resource trackers come last: when their processes are gone they unlink the shared memory that a
    killed engine has left, and end by themselves.
    """
    members = [process for process in psutil.process_iter() if _group_id(process) in group_ids]
    trackers = [process for process in members if _is_resource_tracker(process)]
    for process in members:
        if process not in trackers:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    _, alive = psutil.wait_procs(trackers, timeout=TRACKER_TIMEOUT_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _group_id(process: psutil.Process) -> int:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return -1


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return False
