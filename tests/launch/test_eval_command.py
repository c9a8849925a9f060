"""Evaluations with real processes and vLLM: of a run while it trains, and of its exported model by itself."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from test_runs import overrides, started

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_PROMPTS = 16
EVALUATED = ["data.eval=rev4", f"eval.max_prompts={NUM_PROMPTS}"]
MEAN = "val-core/unknown/reward/mean@1"


def test_a_run_evaluates_its_versions_and_the_eval_command_agrees_about_the_last(tmp_path: Path):
    # Mutations: the last version not published; greedy requests sampled (the two numbers would differ).
    trained = [*EVALUATED, "eval.every=4", "learner.max_versions=6", "learner.lr=1e-4"]
    with started(tmp_path, "asyncrl.cli", "train", *overrides(tmp_path, *trained)) as run:
        assert run.wait(600) == 0, run.text()
        assert run.text().splitlines()[-1] == f"done: {run.run}"
        evaluations = [json.loads(line) for line in (run.run / "evaluations.jsonl").open()]
        assert [(e["version"], e["num_prompts"], e["cut"]) for e in evaluations] == [
            (0, NUM_PROMPTS, ""),
            (4, NUM_PROMPTS, ""),
            (6, NUM_PROMPTS, ""),
        ]
        for version in (0, 4, 6):
            path = run.run / "evaluations" / f"version_{version:06d}.jsonl"
            records = [json.loads(line) for line in path.open()]
            assert [r["ordinal"] for r in records] == list(range(NUM_PROMPTS))
            assert all(r["versions"] == [version] for r in records)
            assert sum(r["reward"] for r in records) / NUM_PROMPTS == pytest.approx(
                next(e for e in evaluations if e["version"] == version)["metrics"][MEAN]
            )
            assert f"evaluation of version {version}: mean@1 " in run.text()
        assert [m["training/policy_version"] for m in run.metrics()] == [1, 2, 3, 4, 5, 6]
        run.assert_nothing_is_left()

    output = tmp_path / "numbers.json"
    words = ["eval", *overrides(tmp_path, *EVALUATED), "--checkpoint", str(run.run / "model")]
    with started(tmp_path, "asyncrl.cli", *words, "--output", str(output), name="eval") as alone:
        assert alone.wait(600) == 0, alone.text()
        numbers = json.loads(output.read_text())
        assert numbers["model"] == str(run.run / "model")
        assert (numbers["num_prompts"], numbers["num_left_out"]) == (NUM_PROMPTS, 0)
        # Greedy, from the same weights: equal but for a near tie that another batch decides.
        assert numbers["metrics"][MEAN] == pytest.approx(
            evaluations[-1]["metrics"][MEAN], abs=1.01 / NUM_PROMPTS
        )
        length = "val-aux/response_length/mean"
        assert numbers["metrics"][length] == pytest.approx(evaluations[-1]["metrics"][length], abs=0.1)
        assert "mean@1" in alone.text()
        assert "Traceback" not in alone.text()
        left = {name for name in os.listdir("/dev/shm") if name.startswith("asyncrl-eval.")}
        assert left - alone.shm_before == set()
        alone.assert_nothing_is_left()
