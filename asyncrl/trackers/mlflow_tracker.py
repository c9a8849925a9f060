"""MLflow, where MLFLOW_TRACKING_URI says (by default a database in the working folder, for `mlflow ui`)."""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Iterator
from typing import Any

import mlflow  # pyright: ignore[reportMissingImports]
from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

from asyncrl.trackers.tracker import Sample, TrackedRun

MAX_PARAMS = 100
MAX_METRICS = 1000
"""Of one request."""
MAX_NAME_CHARACTERS = 250
NOT_IN_A_NAME = re.compile(r"[^\w./: -]")


class MlflowTracker:
    """One run of the experiment; the configuration as parameters, samples as a CSV artifact a version."""

    def check(self) -> None:
        pass

    def open(self, run: TrackedRun) -> None:
        experiment = mlflow.set_experiment(run.project)
        self._client = mlflow.MlflowClient()
        if (run_id := run.stored_id("mlflow")) is not None:  # its parameters, which cannot change, stay
            self._run_id = run_id
            self._client.update_run(run_id, status="RUNNING")
            self._client.log_dict(run_id, run.config, f"config_{run.first_version:06d}.yaml")
            return
        self._run_id = self._client.create_run(experiment.experiment_id, run_name=run.name).info.run_id
        run.store_id("mlflow", self._run_id)
        self._client.log_dict(self._run_id, run.config, "config.yaml")
        params = [Param(allowed_name(key), str(value)) for key, value in flattened(run.config)]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + MAX_PARAMS])

    def log_metrics(self, version: int, metrics: dict[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        values = [Metric(allowed_name(name), value, now_ms, version) for name, value in metrics.items()]
        for start in range(0, len(values), MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=values[start : start + MAX_METRICS])

    def log_samples(self, version: int, samples: list[Sample]) -> None:
        text = io.StringIO()
        csv.writer(text).writerows([Sample._fields, *samples])
        self._client.log_text(self._run_id, text.getvalue(), f"samples/version_{version:06d}.csv")

    def close(self, *, succeeded: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if succeeded else "FAILED")


def allowed_name(name: str) -> str:
    """A metric's name as MLflow takes it, which refuses the whole line for one that it does not.

    `pass@4` becomes `pass_at_4`, other characters and empty parts of a path an underscore; the middle of a name that
    is too long is left out.
    """
    plain = NOT_IN_A_NAME.sub("_", name.replace("@", "_at_"))
    parts = ["_" if part in ("", ".", "..") else part for part in plain.split("/")]
    whole, half = "/".join(parts), MAX_NAME_CHARACTERS // 2 - 2
    return whole if len(whole) <= MAX_NAME_CHARACTERS else f"{whole[:half]}...{whole[-half:]}"


def flattened(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf; a list is a leaf."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


TRACKER = MlflowTracker
