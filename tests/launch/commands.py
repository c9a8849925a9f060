"""asyncrl's commands as a user starts them, and all that they may leave behind. Used by tests of whole runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

START_S = 500.0
END_S = 120.0
MARK = "ASYNCRL_TEST_MARK"


@dataclass
class Started:
    """A command, its output, and everything it may leave behind."""

    process: subprocess.Popen[bytes]
    output: Path
    run: Path
    mark: str
    shm_before: set[str]

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def metrics(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def relatives(self) -> list[psutil.Process]:
        """Every process that inherited this command's environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                # Not process.environ(): vLLM's processes rename themselves, which blanks the first variables,
                # and psutil reads no further.
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                if self.mark.encode() in environment and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_for_versions(self, count: int) -> None:
        deadline = time.monotonic() + START_S
        while len(self.metrics()) < count:
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.2)

    def wait(self, timeout_s: float = START_S) -> int:
        return self.process.wait(timeout=timeout_s)

    def assert_nothing_is_left(self) -> None:
        deadline = time.monotonic() + 15.0
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert left == []

    def left(self) -> list[str]:
        """Command lines of its processes, and names of shared memory: its snapshots, and what vLLM's processes
        shared and nobody has open any more (other runs on this machine have theirs open)."""
        appeared = set(os.listdir("/dev/shm")) - self.shm_before
        snapshots = {name for name in appeared if name.startswith(f"asyncrl-{self.run.name}.")}
        shared = {name for name in appeared if name.startswith("psm_")}
        processes = [" ".join(process.cmdline()) for process in self.relatives()]
        return processes + sorted(snapshots | (shared - mapped_names() if shared else shared))


def mapped_names() -> set[str]:
    """The files of /dev/shm that some process has mapped."""
    names: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            names |= set(re.findall(r"/dev/shm/(\S+)", maps.read_text()))
    return names


@contextlib.contextmanager
def started(tmp_path: Path, *command: str, name: str = "run") -> Iterator[Started]:
    """Runs `python -m asyncrl.cli command ...`; kills what is left of it afterwards."""
    output, mark = tmp_path / f"{name}.out", uuid.uuid4().hex
    shm_before = set(os.listdir("/dev/shm"))
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_CPU_OMP_THREADS_BIND"}
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment | {MARK: mark, "COLUMNS": "300"},
            start_new_session=True,
            # A shell starts what runs in its background with SIGINT ignored, and tests may be such a job.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    run = Started(process, output, tmp_path / run_name(tmp_path), mark, shm_before)
    try:
        yield run
    finally:
        for relative in run.relatives():
            with contextlib.suppress(psutil.Error):
                relative.kill()
        process.wait(timeout=10)


def child(run: Started, role: str) -> psutil.Process:
    """The child of the launcher that plays a role, or (engine) vLLM's engine core."""
    below = psutil.Process(run.process.pid).children(recursive=True)
    if role == "engine":
        return next(p for p in below if p.name().startswith("VLLM::EngineCor"))
    return next(p for p in below if f'"role":"{role}"' in " ".join(p.cmdline()))


def run_name(tmp_path: Path) -> str:
    """Unlike that of any other test: files in shared memory bear it."""
    return f"{tmp_path.parent.name}.{tmp_path.name}"


def overrides(tmp_path: Path, *more: str) -> list[str]:
    where = [f"run.dir={tmp_path}", f"run.name={run_name(tmp_path)}"]
    return ["configs/tiny.yaml", *where, "rollout.kv_cache_gib=0.25", *more]
