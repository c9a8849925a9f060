"""A trained model's numbers and answers: in the run's evaluations, from `asyncrl eval`, and once exported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Started, overrides, started

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_PROMPTS, NUM_VERSIONS, MAX_TOKENS = 16, 6, 8
EVALUATED = [
    "data.eval=rev4",
    f"eval.max_prompts={NUM_PROMPTS}",
    f"rollout.max_completion_tokens={MAX_TOKENS}",
]
MEAN = "val-core/unknown/reward/mean@1"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Six versions of tiny that has ended, with greedy evaluations of versions 0, 4 and 6."""
    folder = tmp_path_factory.mktemp("evaluated")
    more = [*EVALUATED, "eval.every=4", f"learner.max_versions={NUM_VERSIONS}", "learner.lr=1e-3"]
    with started(folder, "asyncrl.cli", "train", *overrides(folder, *more)) as run:
        assert run.wait(600) == 0, run.text()
        run.assert_nothing_is_left()
        yield run


def evaluated(run: Started, version: int) -> list[dict[str, Any]]:
    path = run.run / "evaluations" / f"version_{version:06d}.jsonl"
    return [json.loads(line) for line in path.open()]


def evaluations(run: Started) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.run / "evaluations.jsonl").open()]


def test_a_run_evaluates_its_versions_and_the_last_one(run: Started):
    # Mutations: the last version not published; the evaluated version not pinned.
    assert run.text().splitlines()[-1] == f"done: {run.run}"
    assert [(e["version"], e["num_prompts"], e["cut"]) for e in evaluations(run)] == [
        (0, NUM_PROMPTS, ""),
        (4, NUM_PROMPTS, ""),
        (6, NUM_PROMPTS, ""),
    ]
    for evaluation in evaluations(run):
        records = evaluated(run, evaluation["version"])
        assert [r["ordinal"] for r in records] == list(range(NUM_PROMPTS))
        assert all(r["versions"] == [evaluation["version"]] for r in records)
        mean = sum(r["reward"] for r in records) / NUM_PROMPTS
        assert mean == pytest.approx(evaluation["metrics"][MEAN])
        assert f"evaluation of version {evaluation['version']}: mean@1 " in run.text()
    assert [m["training/policy_version"] for m in run.metrics()] == [1, 2, 3, 4, 5, 6]


def test_the_eval_command_agrees_about_the_exported_model(run: Started, tmp_path: Path):
    # Mutation: greedy requests sampled (the two numbers would differ).
    output = tmp_path / "numbers.json"
    words = ["eval", *overrides(tmp_path, *EVALUATED), "--checkpoint", str(run.run / "model")]
    with started(tmp_path, "asyncrl.cli", *words, "--output", str(output), name="eval") as alone:
        assert alone.wait(600) == 0, alone.text()
        numbers, last = json.loads(output.read_text()), evaluations(run)[-1]["metrics"]
        assert numbers["model"] == str(run.run / "model")
        assert (numbers["num_prompts"], numbers["num_left_out"]) == (NUM_PROMPTS, 0)
        # Greedy, from the same weights: equal but for a near tie that another batch decides.
        assert numbers["metrics"][MEAN] == pytest.approx(last[MEAN], abs=1.01 / NUM_PROMPTS)
        length = "val-aux/response_length/mean"
        assert numbers["metrics"][length] == pytest.approx(last[length], abs=0.1)
        assert "mean@1" in alone.text()
        assert "Traceback" not in alone.text()
        left = {name for name in os.listdir("/dev/shm") if name.startswith("asyncrl-eval.")}
        assert left - alone.shm_before == set()
        alone.assert_nothing_is_left()


def test_the_exported_model_answers_in_vllm_and_in_transformers_as_the_engine_did_at_the_last_version(
    run: Started, tmp_path: Path
):
    # Mutation: any one matrix of version 0 among the exported -> other answers.
    exported = tmp_path / "exported"
    command = [sys.executable, "-m", "asyncrl.cli", "export", str(run.run), str(exported)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    records = evaluated(run, NUM_VERSIONS)
    prompts, answers = [r["prompt"] for r in records], [r["text"] for r in records]
    assert answers != [r["text"] for r in evaluated(run, 0)], (
        "nothing was learned: the test would show nothing"
    )
    assert by_vllm(exported, prompts) == answers
    assert by_transformers(exported, prompts) == answers


def by_vllm(folder: Path, prompts: list[str]) -> list[str]:
    asked = json.dumps({"prompts": prompts, "max_tokens": MAX_TOKENS})
    program = Path(__file__).with_name("greedy.py")
    answered = subprocess.run(
        [sys.executable, str(program), str(folder)], input=asked, text=True, capture_output=True, timeout=300
    )
    assert answered.returncode == 0, answered.stderr
    return json.loads(answered.stdout.splitlines()[-1])


def by_transformers(folder: Path, prompts: list[str]) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    answers = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        whole = model.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False)
        answers.append(tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))
    return answers
