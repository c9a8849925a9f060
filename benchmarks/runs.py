"""Starts `asyncrl train` as a user would, waits for it, and reads its run directory. Used by the benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
ASYNCRL = (sys.executable, "-m", "asyncrl.cli")
"""The command `asyncrl`, of the package that this process imports."""
STOP_S = 60.0
"""A child that was told to stop is killed after it."""
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
}
"""No hub, no tracker: both sides use the model folder that is on the disk."""


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that ended well."""

    metrics: list[dict[str, float]]
    """One a version, as in metrics.jsonl."""
    events: list[dict[str, Any]]
    """Spans, as in events.jsonl."""
    total_s: float
    """From the command to its end, start-up and export included."""

    def column(self, name: str) -> list[float]:
        return [metrics[name] for metrics in self.metrics]


def train(
    config: Path, overrides: Sequence[str], *, folder: Path, name: str, timeout_s: float
) -> FinishedRun:
    """`asyncrl train CONFIG ...` with its run directory in `folder`. Raises RuntimeError when it fails.

    It runs in this file's folder, so that `module:attr` finds the modules of the benchmarks.
    """
    command = [*ASYNCRL, "train", str(config.resolve())]
    command += [*overrides, f"run.dir={folder}", f"run.name={name}"]
    start_s = time.monotonic()
    run_child(command, log=folder / f"{name}.log", timeout_s=timeout_s)
    total_s = time.monotonic() - start_s
    run = folder / name
    return FinishedRun(read_jsonl(run / "metrics.jsonl"), read_jsonl(run / "events.jsonl"), total_s)


def run_child(
    command: Sequence[str], *, log: Path, timeout_s: float, environment: dict[str, str] | None = None
) -> None:
    """Runs a command to its end, its output in `log`. Raises RuntimeError with the last lines of it.

    The child is ended, and waited for, when it takes longer than `timeout_s` or this process is interrupted.
    """
    say(" ".join(command))
    with log.open("w") as output:
        child = subprocess.Popen(
            command,
            cwd=Path(__file__).parent,
            env=os.environ | OFFLINE | (environment or {}),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = child.wait(timeout_s)
        except BaseException:
            child.terminate()
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            raise
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise RuntimeError(f"{' '.join(command)} ended with code {code}; the end of its output:\n{tail}")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def say(text: str) -> None:
    """Progress goes to stderr; stdout is one JSON object."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)
