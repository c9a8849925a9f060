"""Which checkpoint a run goes on from, which changes are refused, and what becomes of files of later versions."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from asyncrl.checkpoint_folder import begin, commit, find_checkpoints, partial_folder, remove_old
from asyncrl.config import Config, load_config
from asyncrl.coordinator.checkpoint import CoordinatorState
from asyncrl.errors import ConfigError
from asyncrl.launch.resume import check_data, evaluated_versions, find_resumption, rewind
from asyncrl.run_directory import RunDirectory


def config_of(tmp_path: Path, *overrides: str) -> Config:
    return load_config(None, [f"run.dir={tmp_path}", "run.name=r", "checkpoint.every=2", *overrides])


def write(directory: RunDirectory, version: int, *, is_committed: bool = True) -> Path:
    """A checkpoint of `version`, whose shards are an empty file."""
    state = CoordinatorState(version, [8, 3], 10, [12], 0, 0, {}, {}, directory.flush())
    partial = partial_folder(directory.path, version)
    begin(partial)
    (partial / "learner-0.safetensors").write_bytes(b"")
    (partial / "coordinator.json").write_bytes(msgspec.json.encode(state))
    return commit(partial) if is_committed else partial


@pytest.fixture
def directory(tmp_path: Path) -> Any:
    made = RunDirectory.create(config_of(tmp_path))
    yield made
    made.close()


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as refused:
        find_resumption(config)
    return str(refused.value)


def test_a_run_that_is_killed_between_shards_and_commit_goes_on_from_the_one_before(
    directory: RunDirectory, tmp_path: Path
):
    # Mutations: take the highest number; take a folder that has its name but no COMMIT; say nothing of it.
    write(directory, 2)
    write(directory, 10)
    (write(directory, 12) / "COMMIT").unlink()
    partial = write(directory, 14, is_committed=False)
    found = find_resumption(config_of(tmp_path))
    assert found.checkpoint.version == found.state.version == 10
    assert [note for note in found.notes if "has no COMMIT" in note and str(partial) in note]
    assert [note for note in found.notes if "has no COMMIT" in note and "version_000012" in note]


def test_the_newest_stay_and_what_is_older_goes_with_what_was_never_whole(directory: RunDirectory):
    # Mutations: the oldest kept; interrupted ones kept for ever; one that is being written removed.
    write(directory, 8, is_committed=False)
    for version in (2, 4, 6, 10):
        write(directory, version)
    write(directory, 12, is_committed=False)
    remove_old(directory.path, 2)
    names = sorted(folder.name for folder in (directory.path / "checkpoints").iterdir())
    assert names == ["version_000006", "version_000010", "version_000012.partial"]
    assert [found.version for found in find_checkpoints(directory.path)[0]] == [10, 6]


def test_a_checkpoint_of_the_same_version_takes_the_place_of_one_that_was_never_whole(
    directory: RunDirectory,
):
    (write(directory, 2) / "COMMIT").unlink()
    stale = partial_folder(directory.path, 2)
    stale.mkdir()
    (stale / "learner-7.safetensors").write_bytes(b"of more ranks")
    again = write(directory, 2)
    assert sorted(file.name for file in again.iterdir()) == [
        "COMMIT",
        "coordinator.json",
        "learner-0.safetensors",
    ]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model=other", "model: 'other', and the run was started with 'tiny'"),
        ("seed=1", "seed: 1, and the run was started with 0"),
        ("algorithm=dapo", "algorithm.type: 'dapo', and the run was started with 'grpo'"),
        ("algorithm=ppo", "algorithm.critic: 'a body of its own', and the run was started with 'null'"),
        ("data.train=sort4", "data.train: "),
        ("data.max_prompt_tokens=9", "data.max_prompt_tokens: 9, and the run was started with 512"),
        ("rollout.group_size=4", "rollout.group_size: 4, and the run was started with 8"),
        ("learner.prompts_per_batch=4", "learner.prompts_per_batch: 4, and the run was started with 16"),
        (
            "learner.lora={rank: 8}",
            "learner.lora: 'rank 8, alpha 32, all-linear', and the run was started with 'null'",
        ),
        ("learner.optimizer=sgd", "learner.optimizer: 'sgd', and the run was started with 'adamw'"),
        ("learner.max_versions=2", "learner.max_versions: 2, and "),
    ],
)
def test_a_change_that_makes_it_another_run_is_refused_with_both_values(
    directory: RunDirectory, tmp_path: Path, override: str, says: str
):
    write(directory, 2)
    assert says in refusal(config_of(tmp_path, override))


def test_other_changes_are_taken_and_said(directory: RunDirectory, tmp_path: Path):
    write(directory, 2)
    changes = ["learner.lr=1e-5", "max_staleness=1", "data.eval=rev4", "eval.every=5", "learner.num_ranks=2"]
    notes = find_resumption(config_of(tmp_path, *changes)).notes
    assert "learner.lr is 1e-05 from here on, and was 0.0003" in notes
    assert "max_staleness is 1 from here on, and was 2" in notes
    assert len(notes) == 5
    assert find_resumption(config_of(tmp_path)).notes == []


def test_what_cannot_go_on_says_what_to_do(tmp_path: Path):
    assert "add run.name=NAME" in refusal(load_config(None, []))
    assert "is no run directory; start the run without --resume" in refusal(config_of(tmp_path))
    RunDirectory.create(config_of(tmp_path)).close()
    assert "has no complete checkpoint (checkpoint.every was 2)" in refusal(config_of(tmp_path))


def test_a_run_that_another_process_writes_to_is_not_reopened(directory: RunDirectory, tmp_path: Path):
    # Mutation: no lock -> two coordinators in one directory.
    with pytest.raises(ConfigError, match="a process still writes to"):
        RunDirectory.reopen(config_of(tmp_path))
    directory.close()
    RunDirectory.reopen(config_of(tmp_path)).close()


def test_data_of_another_size_is_refused_with_both_sizes(directory: RunDirectory, tmp_path: Path):
    write(directory, 2)
    dataset: Any = SimpleNamespace(sizes=[8, 4])
    with pytest.raises(ConfigError, match=r"data.train: \[8, 4\] prompts .* \[8, 3\]"):
        check_data(find_resumption(config_of(tmp_path)), dataset)


# Mutations caught: a file cut at another place; lines of later versions dropped instead of moved; an evaluation
# that was cut kept as that of its version; files that appeared later left.
def test_files_are_taken_back_to_the_checkpoint_and_the_rest_is_moved_aside(
    directory: RunDirectory, tmp_path: Path
):
    run = directory.path

    def train(version: int) -> None:
        directory.append_metrics({"training/policy_version": float(version)})
        (run / "trajectories" / f"version_{version:06d}.jsonl").write_text(f"{version}\n")

    directory.append_evaluation(0, {"val": 0.5}, {"cut": ""})
    for version in (1, 2):
        train(version)
    write(directory, 2)
    train(3)
    (run / "trajectories" / "untrainable.jsonl").write_text("{}\n")
    (run / "evaluations").mkdir()
    for version, cut in ((1, ""), (2, "the run was ended"), (3, "")):
        directory.append_evaluation(version, {}, {"cut": cut})
        (run / "evaluations" / f"version_{version:06d}.jsonl").write_text(f"{version}\n")
    (run / "evaluations.jsonl").open("ab").write(b'{"version": 3, "me')
    (run / "model").mkdir()
    directory.close()
    events = (run / "events.jsonl").read_bytes()

    found = find_resumption(config_of(tmp_path))
    for name in (
        "after_version_000002",
        "after_version_000002-2",
    ):  # the second time there is nothing to move
        rewind(run, found)
        assert str(run / "aside" / name) in found.notes[-1]
        lines = (run / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["training/policy_version"] for line in lines] == [1, 2]
        assert (run / "events.jsonl").read_bytes() == events
        assert sorted(file.name for file in (run / "trajectories").iterdir()) == [
            "version_000001.jsonl",
            "version_000002.jsonl",
        ]
        assert evaluated_versions(run) == {0, 1}
        assert [file.name for file in (run / "evaluations").iterdir()] == ["version_000001.jsonl"]
        assert not (run / "model").exists()
    aside = run / "aside" / "after_version_000002"
    assert json.loads((aside / "metrics.jsonl").read_text())["training/policy_version"] == 3
    assert (aside / "trajectories" / "version_000003.jsonl").read_text() == "3\n"
    assert (aside / "trajectories" / "untrainable.jsonl").read_text() == "{}\n"
    assert sorted(file.name for file in (aside / "evaluations").iterdir()) == [
        "version_000002.jsonl",
        "version_000003.jsonl",
    ]
    assert sorted(file.name for file in (run / "aside" / "after_version_000002-2").iterdir()) == [
        "config.yaml"
    ]
