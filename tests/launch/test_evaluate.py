"""`asyncrl eval` without an engine: what it waits for, what it refuses before the engine starts, what it leaves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_model
from memory_dataset import dataset_of

from asyncrl import cli
from asyncrl.config import Config, load_config
from asyncrl.envs.env import Answer, RewardOutcome, SingleTurnEnv
from asyncrl.errors import ConfigError, EngineError
from asyncrl.launch import evaluate
from asyncrl.rollout_server.engine import Completion, EngineStatistics, GenerationRequest
from asyncrl.types import Status, TrajectoryGroup
from asyncrl.weight_sync.manifest import lay_out
from asyncrl.weight_sync.snapshot import SnapshotWriter


def make_config(*overrides: str) -> Config:
    return load_config(None, ["data.eval=rev4", "eval.every=1", "eval.temperature=1.0", *overrides])


class DoneEngine:
    """An engine that answers at once: its steps stand still from then on."""

    version, incarnation, max_concurrent_requests = 0, "eval", 64

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(1, 0, 0, 0.0, 0)

    async def generate(self, request: GenerationRequest) -> Completion:
        one = np.ones(1, np.int32)
        return Completion(one, np.full(1, -0.5, np.float32), 0 * one, "stop", 0)

    async def start(self) -> None:
        raise AssertionError("the engine was started")

    async def close(self) -> None: ...


class SlowRewards:
    """One after the other, each after `seconds`; `most` of them, then none."""

    needs_group = False

    def __init__(self, seconds: float, most: int) -> None:
        self.num_finished = 0
        self._seconds, self._most = seconds, most
        self._turn = asyncio.Lock()

    async def score_one(self, answer: Answer, row: dict[str, Any]) -> RewardOutcome:
        async with self._turn:
            if self.num_finished == self._most:
                await asyncio.Event().wait()
            await asyncio.sleep(self._seconds)
            self.num_finished += 1
        return RewardOutcome(1.0, Status.SCORED)

    async def score_group(self, answers: Sequence[Answer], row: dict[str, Any]) -> list[RewardOutcome]:
        raise AssertionError("no reward needs the group")


class Text:
    def decode(self, token_ids: Any, skip_special_tokens: bool = True, **kwargs: Any) -> str:
        return "text"


def run_prompts(config: Config, seconds: float, most: int) -> list[TrajectoryGroup]:
    dataset = dataset_of([{"prompt": "p"}], [np.array([1], np.int32)])

    async def run() -> list[TrajectoryGroup]:
        engine: Any = DoneEngine()
        rewards = SlowRewards(seconds, most)
        return await evaluate._run_prompts(engine, config, dataset, SingleTurnEnv(Text()), rewards)

    return asyncio.run(run())


def test_rewards_that_get_on_are_progress_however_long_a_prompt_takes():
    # Mutation: only finished prompts count: this one takes 3 s, and the limit is 1 s.
    config = make_config("eval.num_samples=15", "timeouts.lease_s=0.5", "timeouts.reward_s=0.5")
    (group,) = run_prompts(config, seconds=0.2, most=15)
    assert [t.reward for t in group.trajectories] == [1.0] * 15


def test_rewards_that_stand_still_end_the_evaluation():
    # Mutation: no watch: this test would be ended by pytest's limit.
    config = make_config("eval.num_samples=3", "timeouts.lease_s=0.2", "timeouts.reward_s=0.2")
    with pytest.raises(EngineError, match=r"no finished reward for 0.4 s .*, with 0 of 1 prompts done"):
        run_prompts(config, seconds=0.01, most=2)


def evaluate_folder(monkeypatch: pytest.MonkeyPatch, snapshots: Path, folder: Path) -> evaluate.Evaluated:
    """`evaluate_model` up to the engine, which fails the test when it is started."""
    snapshots.mkdir(exist_ok=True)
    monkeypatch.setattr(evaluate, "make_engine", lambda *_: DoneEngine())
    config = make_config(f"weight_sync.dir={snapshots}", "data.max_prompt_tokens=64")
    return evaluate.evaluate_model(config, folder)


def test_sigterm_while_the_weights_are_written_leaves_no_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Mutation: remove the snapshots when the task ends: its thread goes on, and makes the file after that.
    make_model(tmp_path / "model", tied=True)
    written: list[str] = []

    def write(writer: SnapshotWriter, folder: Path, dtype: str) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.wait(30)
        layout = lay_out([("w", (4,), "float32", 4)], "eval", 0)
        written.append(writer.create(layout))
        return writer.finish(writer.digest(layout.tensors))

    ended = threading.Event()
    run = evaluate._evaluate

    async def evaluated(*arguments: Any) -> evaluate.Evaluated:
        try:
            return await run(*arguments)
        finally:
            ended.set()

    monkeypatch.setattr(evaluate, "_write_snapshot", write)
    monkeypatch.setattr(evaluate, "_evaluate", evaluated)
    with pytest.raises(SystemExit) as stopped:
        evaluate_folder(monkeypatch, tmp_path / "snapshots", tmp_path / "model")
    assert stopped.value.code == 143
    assert len(written) == 1
    assert list((tmp_path / "snapshots").iterdir()) == []


def test_missing_weights_end_it_before_the_engine_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Mutation: write the snapshot when the engine is up, a minute later.
    from safetensors.torch import load_file, save_file

    make_model(tmp_path / "model", tied=False)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"no weights for lm_head\.weight"):
        evaluate_folder(monkeypatch, tmp_path / "snapshots", tmp_path / "model")
    assert list((tmp_path / "snapshots").iterdir()) == []


@pytest.mark.parametrize("fails", [True, False])
def test_what_the_engine_prints_is_shown_when_it_fails_and_not_otherwise(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    # Mutations: the engine's output straight to the terminal; its log removed though the error names it.
    async def evaluated(*arguments: Any) -> str:
        os.system("echo last words; echo an error >&2")  # noqa: ASYNC221
        if fails:
            raise EngineError("it died")
        return "the numbers"

    make_model(tmp_path / "model", tied=True)
    monkeypatch.setattr(evaluate.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(evaluate, "_evaluate", evaluated)
    if fails:
        with pytest.raises(EngineError) as caught:
            evaluate_folder(monkeypatch, tmp_path / "snapshots", tmp_path / "model")
        (log,) = tmp_path.glob("asyncrl-eval.*.log")
        assert str(caught.value) == f"{log} ends with:\n  | last words\n  | an error\nit died"
    else:
        found: Any = evaluate_folder(monkeypatch, tmp_path / "snapshots", tmp_path / "model")
        assert found == "the numbers"
        assert list(tmp_path.glob("asyncrl-eval.*.log")) == []
    said = capfd.readouterr()
    assert "last words" not in said.out + said.err
    assert "starting the engine (about a minute)" in said.err


def test_nothing_to_evaluate_is_said_with_its_own_key():
    # Mutation: ask for eval.every, which nobody set and nothing here reads.
    with pytest.raises(ConfigError, match=r"^data\.eval: names nothing to evaluate"):
        evaluate.evaluate_model(load_config(None, []))


def test_a_checkpoint_that_is_no_model_is_named_with_its_option(tmp_path: Path):
    with pytest.raises(ConfigError, match=rf"--checkpoint: {tmp_path}/nothing is neither a run directory"):
        cli.evaluate(None, ["data.eval=rev4"], tmp_path / "nothing")


STAND_IN = """
import os, sys
from asyncrl import cli
from asyncrl.envs.eval_report import EvalReport
from asyncrl.launch import evaluate

def evaluate_model(config, checkpoint):
    print("from Python")
    os.system("echo from a child")
    return evaluate.Evaluated("m", EvalReport({"val-core/a/reward/mean@1": 0.5}, 4, 1), 2.0, 3, 5)

evaluate.evaluate_model = evaluate_model
sys.argv = ["asyncrl", "eval", "data.eval=rev4", *sys.argv[1:]]
cli.main()
"""


def eval_command(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", STAND_IN, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_stdout_has_the_json_and_nothing_else_whatever_the_engine_prints():
    # Mutation: print to stdout as it is: vLLM's and gloo's lines come before the JSON.
    done = eval_command()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "model": "m",
        "num_prompts": 4,
        "num_left_out": 1,
        "num_filtered": 3,
        "num_too_long": 5,
        "seconds": 2.0,
        "metrics": {"val-core/a/reward/mean@1": 0.5},
    }
    for said in ("from Python", "from a child", "m: mean@1 0.500 (4 prompts, 1 left out: no reward), 2 s"):
        assert said in done.stderr


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_evaluated(tmp_path: Path):
    # Mutation: open the file when the numbers are there: they are lost.
    for output in (tmp_path / "no_such" / "numbers.json", tmp_path):
        done = eval_command("--output", str(output))
        assert done.returncode == 2
        assert f"--output: {output} cannot be written" in done.stderr
        assert "from Python" not in done.stderr
    assert eval_command("--output", str(tmp_path / "numbers.json")).stdout == ""
    assert json.loads((tmp_path / "numbers.json").read_text())["num_prompts"] == 4
