"""A whole run that is killed and goes on: real processes, vLLM, checkpoints on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import END_S, Started, child, overrides, started

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.slow]

SHORT = ["learner.max_versions=7", "checkpoint.every=2", "checkpoint.keep=2", "timeouts.shutdown_s=10"]


def trained_ordinals(run: Started) -> list[set[int]]:
    """Of each version, in the order of its files."""
    files = sorted((run.run / "trajectories").glob("version_*.jsonl"))
    return [{json.loads(line)["ordinal"] for line in file.open()} for file in files]


# Mutations caught: the learner starting with the initial model or version 0; consumed ordinals leased again; lines of
# versions after the checkpoint left in metrics.jsonl.
def test_a_run_whose_learner_is_killed_goes_on_and_has_each_version_once(tmp_path: Path):
    command = ["asyncrl.cli", "train", *overrides(tmp_path, *SHORT)]
    with started(tmp_path, *command) as run:
        run.wait_for_versions(5)
        child(run, "learner").kill()
        assert run.wait(END_S) == 1, run.text()
        run.assert_nothing_is_left()
        before = run.metrics()
    checkpoints = run.run / "checkpoints"
    newest = max(int(folder.parent.name[8:]) for folder in checkpoints.glob("*/COMMIT"))
    assert newest in (4, 6)
    with started(tmp_path, *command, name="refused") as refused:
        assert refused.wait(END_S) == 2
        assert "exists already; choose another run.name, or go on with it: --resume" in refused.text()
    with started(tmp_path, *command, "learner.lr=2e-4", "--resume", name="resumed") as resumed:
        assert resumed.wait(600) == 0, resumed.text()
        assert f"goes on at version {newest}" in resumed.text()
        assert "learner.lr is 0.0002 from here on, and was 0.0003" in resumed.text()
        resumed.assert_nothing_is_left()
    metrics = resumed.metrics()
    assert [m["training/policy_version"] for m in metrics] == list(range(1, 8))
    assert metrics[:newest] == before[:newest]
    assert [m["actor/lr"] for m in metrics[newest:]] == [2e-4] * (7 - newest)
    assert metrics[5]["timing_s/checkpoint"] > 0
    assert all(m["staleness/max"] <= 2 for m in metrics)
    ordinals = trained_ordinals(resumed)
    assert [len(of_version) for of_version in ordinals] == [16] * 7
    assert set.union(*ordinals) == set(range(7 * 16))
    assert sorted(folder.name for folder in checkpoints.iterdir()) == ["version_000004", "version_000006"]
    assert (resumed.run / "model" / "config.json").is_file()
    aside = resumed.run / "aside" / f"after_version_{newest:06d}"
    assert "lr: 0.0003" in (aside / "config.yaml").read_text()
    assert len(before) == newest or (aside / "metrics.jsonl").is_file()
