"""W&B, trackio and MLflow for real, offline: each in a process of its own, read back from what it has stored.

Their packages are extras; where one is missing its test is skipped.
"""

from __future__ import annotations

import csv
import json
import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

METRICS = [
    {"training/policy_version": 1.0, "actor/pg_loss": -0.125, "val-core/gsm8k/reward/mean@4": 0.25},
    {
        "training/policy_version": 2.0,
        "actor/pg_loss": 1e-9,
        "val-core/数学/reward/mean@1": 0.75,
        "val-core/物理/reward/mean@1": 0.25,
        "val-core//data/x.parquet/reward/mean@1": 0.5,
    },
    {"training/policy_version": 1.0, "val-core/late/reward/mean@4": 0.5},
]
"""The last is of an evaluation that ended when version 2 was trained."""
SAMPLES = [["p|0", "t0\nend", 0.5, "0, 1"], ["p1", "t1", None, "1"]]
SECRET = "0123456789abcdef0123456789abcdef01234567"
PROGRAM = f"""
import asyncio, pytest, sys
from collections import Counter
from pathlib import Path
from asyncrl.config import load_config
from asyncrl.run_directory import RunDirectory
from asyncrl.trackers.delivery import Trackers
from asyncrl.trackers.tracker import check_trackers

overrides = ["run.name=r", "run.project=p", "timeouts.trackers_s=240"]
config = load_config(None, [*overrides, "run.trackers=[" + sys.argv[1] + "]"])
check_trackers(config.run.trackers)
first_version = int(sys.argv[2])
directory = RunDirectory.reopen(config) if first_version else RunDirectory.create(config)

async def train():
    counts = Counter()
    async with Trackers(
        config, directory.path, note=pytest.fail, counts=counts, say=pytest.fail, first_version=first_version
    ) as trackers:
        directory.observers.append(trackers)
        for metrics in {METRICS!r}:
            directory.append_metrics(metrics)
        trackers.trajectories_written(2, [
            dict(prompt="p|0", text="t0\\nend", reward=0.5, versions=[0, 1]),
            dict(prompt="p1", text="t1", reward=None, versions=[1]),
        ])
    assert not counts, counts

asyncio.run(train())
"""


def run_program(
    program: str, *arguments: str, folder: Path, timeout_s: float, environment: dict[str, str]
) -> str:
    """What a program that ends well prints, with a home and a working folder of its own."""
    own = {"HOME": str(folder), "PYTHONPATH": str(Path(__file__).parents[2]), "WANDB_API_KEY": SECRET}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env=os.environ | own | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def track(name: str, folder: Path, first_version: int = 0, **environment: str) -> None:
    """A run of three lines and one table with one tracker, in `folder`; no secret gets into the run directory."""
    pytest.importorskip(name)
    run_program(PROGRAM, name, str(first_version), folder=folder, timeout_s=300, environment=environment)
    files = [path for path in (folder / "runs" / "r").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def steps(rows: list[tuple[int, dict[str, Any]]]) -> list[tuple[int, str, float]]:
    """(step, name, value) of every number, sorted."""
    return sorted((step, k, v) for step, row in rows for k, v in row.items() if isinstance(v, float))


EXPECTED = steps([(int(line["training/policy_version"]), line) for line in METRICS])


def leveldb_records(path: Path) -> list[bytes]:
    """The records of W&B's offline file: LevelDB's log format behind a header of 7 bytes."""
    raw, records, position = path.read_bytes(), [], 7
    whole = b""
    while position + 7 <= len(raw):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        length, kind = int.from_bytes(raw[position + 4 : position + 6], "little"), raw[position + 6]
        whole += raw[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(whole)
            whole = b""
    return records


def test_wandb_offline_has_every_number_by_policy_version_the_config_and_the_table(tmp_path: Path):
    # Mutations: log with step= -> W&B refuses the evaluation that ends late; leave define_metric out.
    track("wandb", tmp_path, WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    from wandb.proto import wandb_internal_pb2

    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows, config, x_axes = [], {}, set()
    for raw in leveldb_records(file):
        record = wandb_internal_pb2.Record.FromString(raw)
        if record.HasField("history"):
            rows.append(
                {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            )
        if record.HasField("run"):
            config |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
        if record.HasField("metric"):
            x_axes.add(record.metric.step_metric)
    numbers = [
        (int(row["training/policy_version"]), {k: float(v) for k, v in row.items() if "/" in k})
        for row in rows
        if not any(name.startswith("samples") for name in row)
    ]
    assert steps(numbers) == EXPECTED
    assert "training/policy_version" in x_axes
    assert config["max_staleness"] == 2
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.json")
    stored = json.loads(table.read_text())
    assert stored["columns"] == ["prompt", "completion", "reward", "versions"]
    assert stored["data"] == SAMPLES


def test_trackio_has_every_number_at_its_version_the_config_and_the_table(tmp_path: Path):
    # Mutation: log without a step -> 0, 1, 2.
    track("trackio", tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    with sqlite3.connect(tmp_path / "trackio" / "p.db") as database:
        rows = [
            (step, json.loads(raw)) for step, raw in database.execute("select step, metrics from metrics")
        ]
        (config,) = database.execute("select config from configs").fetchone()
    assert steps(rows) == EXPECTED
    assert json.loads(config)["max_staleness"] == 2
    (table,) = [(step, row["samples"]) for step, row in rows if "samples" in row]
    names = ("prompt", "completion", "reward", "versions")
    assert table[0] == 2
    assert table[1]["_value"] == [dict(zip(names, row, strict=True)) for row in SAMPLES]


def test_mlflow_has_every_number_at_its_version_the_config_and_the_table(tmp_path: Path):
    # Mutations: keep "@" or "//" in a name -> MLflow refuses the line; letters that are not ASCII replaced -> two
    # sources share a name; over 100 parameters in one request.
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    track("mlflow", tmp_path, MLFLOW_TRACKING_URI=uri)
    import mlflow

    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert (run.info.run_name, run.info.status) == ("r", "FINISHED")
    assert run.data.params["max_staleness"] == "2"
    assert run.data.params["algorithm.correction.weight.upper"] == "2.0"
    found = [
        (metric.step, {name.replace("_at_", "@").replace("/_/", "//"): metric.value})
        for name in run.data.metrics
        for metric in client.get_metric_history(run.info.run_id, name)
    ]
    assert steps(found) == EXPECTED
    # The artifacts are in the working folder of the process that tracked, where its database put them.
    (table,) = tmp_path.glob("**/samples/version_000002.csv")
    with table.open(newline="") as file:
        head, first, second = csv.reader(file)
    assert head == ["prompt", "completion", "reward", "versions"]
    assert (first, second) == (["p|0", "t0\nend", "0.5", "0, 1"], ["p1", "t1", "", "1"])


def test_mlflow_gets_no_name_that_is_too_long_and_keeps_both_its_ends():
    # Mutation: cut it at its end -> mean@1 and best@4 of one source are one name.
    pytest.importorskip("mlflow")
    from asyncrl.trackers.mlflow_tracker import allowed_name

    names = [allowed_name(f"val-core/{'x' * 300}/reward/{metric}") for metric in ("mean@1", "best@4/mean")]
    assert [len(name) <= 250 for name in names] == [True, True]
    assert names[0].startswith("val-core/xxx")
    assert [name.rpartition("/reward/")[2] for name in names] == ["mean_at_1", "best_at_4/mean"]


HANGING = """
import asyncio
from collections import Counter
from pathlib import Path
from asyncrl.config import load_config
from asyncrl.trackers.delivery import Trackers
from asyncrl.trackers.tracker import check_trackers

config = load_config(None, ["run.name=r", "run.trackers=wandb", "timeouts.trackers_s=6"])
check_trackers(config.run.trackers)

async def train():
    async with Trackers(config, Path("."), note=print, counts=Counter(), say=print) as trackers:
        trackers.metrics_written({"training/policy_version": 1.0})

asyncio.run(train())
print("the run has ended", flush=True)
"""


def test_a_wandb_server_that_never_answers_lets_the_process_end(tmp_path: Path):
    # Mutation: leave init_timeout to W&B, whose 90 s a process that has ended its run waits for when it exits.
    pytest.importorskip("wandb")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = {"WANDB_BASE_URL": url, "WANDB_SILENT": "true"}
        said = run_program(HANGING, folder=tmp_path, timeout_s=60, environment=environment)
    assert "tracker wandb" in said
    assert said.endswith("the run has ended\n")


def test_a_resumed_run_is_the_same_run_to_its_vendor(tmp_path: Path):
    # Mutation: open it anew -> two runs of the same name.
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for first_version in (0, 2):
        track("mlflow", tmp_path, first_version, MLFLOW_TRACKING_URI=uri)
    import mlflow

    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert run.info.status == "FINISHED"
    assert len(client.get_metric_history(run.info.run_id, "actor/pg_loss")) == 4


def test_a_resumed_run_is_the_same_run_to_trackio_and_wandb(tmp_path: Path):
    # Mutation: as above.
    for name in ("trackio", "wandb"):
        (tmp_path / name).mkdir()
    for first_version in (0, 2):
        track("trackio", tmp_path / "trackio", first_version, TRACKIO_DIR=str(tmp_path / "trackio"))
        track(
            "wandb",
            tmp_path / "wandb",
            first_version,
            WANDB_MODE="offline",
            WANDB_DIR=str(tmp_path / "wandb"),
        )
    with sqlite3.connect(tmp_path / "trackio" / "p.db") as database:
        assert len(database.execute("select distinct run_name from metrics").fetchall()) == 1
    ids = {folder.name.rpartition("-")[2] for folder in tmp_path.glob("wandb/wandb/offline-run-*")}
    assert len(ids) == 1
