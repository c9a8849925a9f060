"""TensorBoard reads back what the run directory has: from one event file, with TensorBoard's own reader."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

from tensorboard.util import tensor_util  # noqa: E402

from asyncrl.config import load_config  # noqa: E402
from asyncrl.run_directory import PromptText, RunDirectory  # noqa: E402
from asyncrl.trackers.delivery import Trackers  # noqa: E402
from asyncrl.types import Status, Trajectory, TrajectoryGroup  # noqa: E402


def group(ordinal: int, rewards: list[float | None], versions: list[int]) -> TrajectoryGroup:
    n = len(versions)
    trajectories = [
        Trajectory(
            token_ids=np.zeros(n, np.int32),
            loss_mask=np.ones(n, np.uint8),
            rollout_logprobs=np.zeros(n, np.float32),
            policy_versions=np.array(versions, np.int32),
            reward=reward,
            status=Status.SCORED if reward is not None else Status.REWARD_FAILED,
            finish_reason="stop",
            text=f"a|b\n<think>{sample}",
        )
        for sample, reward in enumerate(rewards)
    ]
    return TrajectoryGroup(ordinal, 0, np.zeros(2, np.int32), trajectories)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Three versions, tracked by TensorBoard."""
    config = load_config(
        None, [f"run.dir={tmp_path}", "run.name=r", "run.trackers=[tensorboard]", "run.samples_per_version=2"]
    )
    directory = RunDirectory.create(config)

    async def train() -> None:
        counts: Counter[str] = Counter()
        async with Trackers(
            config, directory.path, note=pytest.fail, counts=counts, say=pytest.fail
        ) as trackers:
            directory.observers.append(trackers)
            for version in (1, 2, 3):
                directory.append_metrics(
                    {
                        "training/policy_version": float(version),
                        "actor/pg_loss": version / 7,
                        "perf/x@2": -1e-9,
                    }
                )
                groups = [group(version, [0.5, 1.0], [0, 1]), group(9, [None, 2.0], [version])]
                prompts = [PromptText("first?", None), PromptText("second?", None)]
                directory.write_trajectories(version, groups, prompts, limit=None)

    asyncio.run(train())
    directory.close()
    return directory


def read(run: RunDirectory) -> event_accumulator.EventAccumulator:
    events = event_accumulator.EventAccumulator(str(run.path))
    events.Reload()
    return events


def test_every_number_of_metrics_jsonl_is_a_scalar_at_its_version(run: RunDirectory):
    # Mutations: step by the number of the line from 0; leave out a name; write wall times as steps.
    events = read(run)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    assert set(events.Tags()["scalars"]) == set(lines[0])
    for name in lines[0]:
        found = [(event.step, event.value) for event in events.Scalars(name)]
        expected = [(int(line["training/policy_version"]), float(np.float32(line[name]))) for line in lines]
        assert found == expected, name


def test_samples_are_a_table_of_text_and_the_config_is_shown(run: RunDirectory):
    # Mutations: join versions of the group instead of the trajectory; write 0.0 for no reward; rank 1.
    events = read(run)
    table = events.Tensors("samples")[1]
    assert table.step == 2
    assert tensor_util.make_ndarray(table.tensor_proto).tolist() == [
        [b"prompt", b"completion", b"reward", b"versions"],
        [b"first?", b"a|b\n<think>0", b"0.5", b"0, 1"],
        [b"second?", b"a|b\n<think>0", b"", b"2"],
    ]
    (config,) = events.Tensors("config")
    text = tensor_util.make_ndarray(config.tensor_proto).item().decode()
    assert "    max_staleness: 2\n" in text
    metadata = events.SummaryMetadata("samples")
    assert metadata.plugin_data.plugin_name == "text"


def test_a_resumed_run_goes_on_in_the_same_curve_without_the_lost_versions(tmp_path: Path):
    # Mutations: no session start -> versions 3 and 4 twice, the lost ones among them; its step one lower or higher.
    config = load_config(None, [f"run.dir={tmp_path}", "run.name=resumed", "run.trackers=[tensorboard]"])

    async def train(first_version: int, value: float) -> None:
        async with Trackers(
            config,
            tmp_path,
            note=pytest.fail,
            counts=Counter(),
            say=pytest.fail,
            first_version=first_version,
        ) as trackers:
            for version in range(first_version + 1, 5):
                trackers.metrics_written({"training/policy_version": float(version), "x": value})

    asyncio.run(train(0, 1.0))
    time.sleep(1.0)  # files are read in the order of their names, which have the second
    asyncio.run(train(2, 5.0))
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("x")] == [
        (1, 1.0),
        (2, 1.0),
        (3, 5.0),
        (4, 5.0),
    ]


def test_a_number_of_an_evaluation_that_ends_late_takes_nothing_away(tmp_path: Path):
    # Mutation: no file version in the first record -> TensorBoard's reader drops the later steps of the name.
    config = load_config(None, [f"run.dir={tmp_path}", "run.name=late", "run.trackers=[tensorboard]"])

    async def train() -> None:
        async with Trackers(
            config, tmp_path, note=pytest.fail, counts=Counter(), say=pytest.fail
        ) as trackers:
            for version in (1, 2, 1):
                trackers.metrics_written({"training/policy_version": float(version)})

    asyncio.run(train())
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(event.step for event in events.Scalars("training/policy_version")) == [1, 1, 2]
