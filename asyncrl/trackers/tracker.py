"""What an experiment tracker is to a run: five calls, each module of this folder makes them for one vendor.

A tracker is one file here, whose class TRACKER satisfies Tracker and which imports its package at the top, and
one name in `run.trackers`. Trackers live in the coordinator's process: none may load torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from asyncrl.errors import ConfigError


class Sample(NamedTuple):
    """One row of a version's table of samples."""

    prompt: str
    completion: str
    reward: float | None
    """None where the rollout has none."""
    versions: str
    """The policy versions that sampled it, as in "3, 4"."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is told of a run when it opens."""

    name: str
    project: str
    folder: Path
    """The run directory."""
    config: dict[str, Any]
    """The resolved configuration as plain data."""
    close_s: float
    """`close` must be done by then. Seconds."""
    first_version: int = 0
    """Above 0: the run was resumed at this version, and this is not the first time that it is opened."""

    def stored_id(self, tracker: str) -> str | None:
        """The vendor's own name of this run, which was kept when it was opened the first time; None else."""
        file = self._id_file(tracker)
        return file.read_text().strip() if self.first_version and file.is_file() else None

    def store_id(self, tracker: str, run_id: str) -> None:
        self._id_file(tracker).write_text(f"{run_id}\n")

    def _id_file(self, tracker: str) -> Path:
        return self.folder / f"{tracker}-run-id"


class Tracker(Protocol):
    """One vendor. `check` is called before a run starts, the rest from one thread, in the order below.

    Any call may block and may raise anything: see Delivery.
    """

    def check(self) -> None:
        """Raises ConfigError when `open` is known to fail here, as it does without an account."""
        ...

    def open(self, run: TrackedRun) -> None: ...

    def log_metrics(self, version: int, metrics: dict[str, float]) -> None:
        """`metrics`: a line of metrics.jsonl, under its own names, at step `version`."""
        ...

    def log_samples(self, version: int, samples: list[Sample]) -> None:
        """What `version` was trained on, a few rows of it."""
        ...

    def close(self, *, succeeded: bool) -> None:
        """Sends what is left."""
        ...


def load_tracker(name: str) -> Tracker:
    """The tracker of that name, imported. Raises ConfigError, with the command that installs it."""
    try:
        module = importlib.import_module(f"asyncrl.trackers.{name}_tracker")
    except ImportError as error:
        raise ConfigError(
            f"run.trackers: {name} cannot be imported ({error}); install it with `pip install {name}`"
        ) from error
    return module.TRACKER()


def check_trackers(names: Iterable[str]) -> None:
    """Raises ConfigError for a tracker that is not installed or not ready."""
    for name in names:
        load_tracker(name).check()
