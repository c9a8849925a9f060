"""The children of the launcher: started with their log files, watched, and ended together."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.errors import PeerLost
from asyncrl.launch.child import ChildSpec
from asyncrl.launch.resources import Placement

LOG_LINES_SHOWN = 20


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
        lines = child.log_file.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        shown = "\n".join(f"  | {line}" for line in lines)
        last_words = next((line for line in reversed(lines) if line.startswith("asyncrl ")), "")
        raise PeerLost(f"{child.log_file} ends with:\n{shown}\n{child.name} {how}. {last_words}".rstrip())

    async def stop(self) -> None:
        """Asks every child to end, kills what is left after the deadline, children of children included."""
        running = [child for child in self.children if child.process.returncode is None]
        for child in running:
            _signal_group(child, signal.SIGTERM, leader_only=True)
        waits = [asyncio.ensure_future(child.process.wait()) for child in running]
        if waits:
            await asyncio.wait(waits, timeout=self._shutdown_s)
        for child in self.children:
            _signal_group(child, signal.SIGKILL, leader_only=False)
        for child in self.children:
            await child.process.wait()


def _signal_group(child: Child, number: signal.Signals, *, leader_only: bool) -> None:
    """The leader alone for a polite end: it knows how to end its own children."""
    try:
        if leader_only:
            child.process.send_signal(number)
        else:
            os.killpg(child.process.pid, number)
    except ProcessLookupError:
        pass  # nothing of it is left
