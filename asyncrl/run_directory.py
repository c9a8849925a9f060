"""The run directory: a contract that tools and tests read. One process, the coordinator's, writes to it.

runs/<name>/config.yaml                    the resolved config
           /metrics.jsonl                  one object a version, flat keys area/name
           /events.jsonl                   spans with monotonic times; the first line has the wall-clock time too
           /evaluations.jsonl              one object an evaluation
           /evaluations/version_000012.jsonl    prompt, answer, text, reward of each evaluated completion
           /trajectories/version_000012.jsonl   prompt, answer, text, reward, versions of each trajectory
           /trajectories/untrainable.jsonl      the same of groups that were consumed without training, if any:
                                                the first of each version
           /logs/<role>-<rank>.log         what each process printed
           /model/                         the last version, Hugging Face format, with its model card
           /checkpoints/version_000012/    complete only with its COMMIT file (checkpoint_folder.py)
           /aside/after_version_000012/    what a run that was resumed at version 12 had written of later ones
           /events.out.tfevents.*          for TensorBoard, where run.trackers names it

Text is UTF-8, whatever the locale.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from asyncrl.config import Config, dump_config
from asyncrl.errors import ConfigError
from asyncrl.types import Span, TrajectoryGroup

GROWING = ("metrics.jsonl", "events.jsonl", "trajectories/untrainable.jsonl")
"""Files that lines are added to in the order of versions."""
EVALUATIONS = "evaluations.jsonl"
"""Not in the order of versions: an evaluation may end when later versions are trained."""


def default_run_name() -> str:
    """From the time, and four hex digits: two runs may start in the same second."""
    return f"{time.strftime('run-%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def run_path(config: Config) -> Path:
    """The run directory that a configuration with a run.name names."""
    assert config.run.name is not None
    return (Path(config.run.dir) / config.run.name).resolve()


def exists_already(path: Path) -> ConfigError:
    """Nothing is overwritten."""
    return ConfigError(
        f"run.name: {path} exists already; choose another run.name, or go on with it: --resume"
    )


@dataclass(frozen=True, slots=True)
class PromptText:
    """What is written of a group's prompt."""

    text: str
    """As it was tokenised, the chat template applied."""
    answer: Any
    """The row's answer column; None where it has none."""


class RunObserver(Protocol):
    """Sees what is written, right after it is. Must neither wait nor raise."""

    def metrics_written(self, metrics: Mapping[str, float]) -> None: ...

    def trajectories_written(self, version: int, records: Sequence[Mapping[str, Any]]) -> None:
        """`records`: of all trajectories of the version, however many the file keeps."""
        ...


class RunDirectory:
    """Creates `<run.dir>/<run.name>` and appends to its files; every line is flushed as it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.config_file = path / "config.yaml"
        self.model = path / "model"
        self.observers: list[RunObserver] = []
        self._open_files: dict[str, TextIO] = {}
        self._held: int | None = None
        """The lock on the folder."""

    @classmethod
    def create(cls, config: Config) -> RunDirectory:
        """Raises ConfigError when the directory exists: nothing is overwritten."""
        path = run_path(config)
        try:
            path.mkdir(parents=True)
        except FileExistsError as error:
            raise exists_already(path) from error
        except OSError as error:
            raise ConfigError(f"run.dir: {path} cannot be made ({error.strerror})") from error
        directory = cls(path)
        directory._lock()
        directory.logs.mkdir()
        (path / "trajectories").mkdir()
        directory._begin(config, "created")
        return directory

    @classmethod
    def reopen(cls, config: Config) -> RunDirectory:
        """That of a run which will go on. Raises ConfigError while another process writes to it."""
        directory = cls(run_path(config))
        directory._lock()
        return directory

    def go_on(self, config: Config, version: int) -> None:
        """Once launch/resume.py has taken a reopened one back to `version`."""
        self.logs.mkdir(exist_ok=True)
        self._begin(config, "resumed", version=version)

    def _lock(self) -> None:
        """Until `close`, or the end of this process, however it ends."""
        self._held = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise ConfigError(f"run.name: a process still writes to {self.path}; end it first") from error

    def _begin(self, config: Config, event: str, **fields: int) -> None:
        self.config_file.write_text(dump_config(config), encoding="utf-8")
        now_s = time.monotonic()
        self.append_spans("coordinator", [Span(event, now_s, now_s, {"unix_s": time.time(), **fields})])

    def log_file(self, role: str, rank: int) -> Path:
        return self.logs / f"{role}-{rank}.log"

    def append_metrics(self, metrics: dict[str, float]) -> None:
        self._append("metrics.jsonl", metrics)
        for observer in self.observers:
            observer.metrics_written(metrics)

    def append_spans(self, process: str, spans: Iterable[Span]) -> None:
        for span in spans:
            self._append(
                "events.jsonl",
                {
                    "process": process,
                    "name": span.name,
                    "start_s": span.start_s,
                    "end_s": span.end_s,
                    **span.fields,
                },
            )

    def write_trajectories(
        self, version: int, groups: list[TrajectoryGroup], prompts: list[PromptText], limit: int | None
    ) -> None:
        """The trajectories that version `version` was trained on; at most `limit` (None: all).

        `prompts`: of each group.
        """
        records = _trajectory_records(groups, prompts)
        target = self.path / "trajectories" / f"version_{version:06d}.jsonl"
        target.write_text(_json_lines(records[:limit]), encoding="utf-8")
        for observer in self.observers:
            observer.trajectories_written(version, records)

    def append_untrainable(
        self, groups: list[TrajectoryGroup], prompts: list[PromptText], limit: int
    ) -> None:
        """Groups that no version was trained on: no reward, too old, or filtered; the first `limit` trajectories.

        `prompts`: of each group.
        """
        for record in _trajectory_records(groups, prompts)[:limit]:
            self._append("trajectories/untrainable.jsonl", record)

    def append_evaluation(self, version: int, metrics: dict[str, float], about: Mapping[str, object]) -> None:
        """What the evaluation of `version` gave; `about`: whatever else is known of it."""
        self._append(EVALUATIONS, {"version": version, **about, "metrics": metrics})
        if metrics:
            for observer in self.observers:
                observer.metrics_written({"training/policy_version": float(version), **metrics})

    def write_evaluation(
        self, version: int, groups: list[TrajectoryGroup], prompts: list[PromptText]
    ) -> None:
        """The completions of the evaluation of `version`; a group's ordinal is its row in data.eval."""
        folder = self.path / "evaluations"
        folder.mkdir(exist_ok=True)
        target = folder / f"version_{version:06d}.jsonl"
        target.write_text(_json_lines(_trajectory_records(groups, prompts)), encoding="utf-8")

    def flush(self) -> dict[str, int]:
        """Returns once the files that grow are on disk: their sizes in bytes, by name."""
        for name in self._open_files.keys() & GROWING:
            os.fsync(self._open_files[name].fileno())
        return {name: (self.path / name).stat().st_size for name in GROWING if (self.path / name).exists()}

    def close(self) -> None:
        for file in self._open_files.values():
            file.close()
        self._open_files.clear()
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _append(self, name: str, record: Mapping[str, object]) -> None:
        if name not in self._open_files:
            self._open_files[name] = (self.path / name).open("a", encoding="utf-8")
        file = self._open_files[name]
        file.write(json.dumps(record) + "\n")
        file.flush()


def _trajectory_records(
    groups: Iterable[TrajectoryGroup], prompts: Iterable[PromptText]
) -> list[dict[str, object]]:
    """One record a trajectory. `prompts`: of each group."""
    return [
        {
            "ordinal": group.ordinal,
            "sample": sample,
            "prompt": prompt.text,
            "answer": prompt.answer,
            "reward": trajectory.reward,
            "reward_components": trajectory.reward_components,
            "status": trajectory.status,
            "finish_reason": trajectory.finish_reason,
            "prompt_tokens": len(group.prompt_ids),
            "completion_tokens": len(trajectory),
            "trained_tokens": int(trajectory.loss_mask.sum()),
            "versions": sorted(set(trajectory.policy_versions.tolist())),
            "text": trajectory.text,
            "detail": trajectory.detail,
        }
        for group, prompt in zip(groups, prompts, strict=True)
        for sample, trajectory in enumerate(group.trajectories)
    ]


def _json_lines(records: Iterable[Mapping[str, object]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
