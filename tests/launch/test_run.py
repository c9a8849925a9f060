"""What the launcher shows of a run that ends badly, without a process."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config import Config, load_config
from asyncrl.coordinator.status import RunStatus
from asyncrl.errors import PeerLost
from asyncrl.launch import run as run_module
from asyncrl.launch.run import Launch, run_until_done
from asyncrl.run_directory import RunDirectory


class Noting:
    """A coordinator that has something to say when it is cancelled, a moment after."""

    def __init__(self) -> None:
        self.status = RunStatus(1)
        self.ending = asyncio.Event()
        self.stopped_with = ""

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            self.status.note("evaluation of version 4 was cut")

    async def stop_peers(self, error: str) -> None:
        self.stopped_with = error


class OneLostChild:
    """Processes of which one is lost at once."""

    children = ("rollout-server-0",)

    async def watch(self, child: str, ending: asyncio.Event) -> None:
        await asyncio.sleep(0.05)
        raise PeerLost(f"{child} was killed by SIGKILL")


def test_what_the_coordinator_says_at_its_end_is_shown_although_a_child_ended_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # Mutation: the console in one task group with the rest: it is cancelled, and gone, before the last note comes.
    async def scenario() -> Any:
        prepared: Any = SimpleNamespace(config=load_config(None, ["run.name=r"]))
        launch = Launch(prepared, RunDirectory(tmp_path), start=(), on_listening=None)
        launch._processes = OneLostChild()  # pyright: ignore[reportAttributeAccessIssue]
        coordinator: Any = Noting()
        with pytest.raises(PeerLost, match="rollout-server-0 was killed by SIGKILL"):
            await launch._watch(coordinator)
        return coordinator

    assert asyncio.run(scenario()).stopped_with == "rollout-server-0 was killed by SIGKILL"
    assert "evaluation of version 4 was cut" in capsys.readouterr().out


class Rows:
    """What is said of a data set."""

    def __init__(self, num_prompts: int, source: str, num_filtered: int, num_too_long: int) -> None:
        self.source, self.num_filtered, self.num_too_long = source, num_filtered, num_too_long
        self._num_prompts = num_prompts

    def __len__(self) -> int:
        return self._num_prompts


def test_rows_that_were_left_out_are_shown_of_training_and_of_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # Mutation: only those of data.train.
    prepared: Any = SimpleNamespace(
        config=load_config(None, ["run.name=r"]),
        dataset=Rows(8, "train.jsonl", 0, 0),
        eval_dataset=Rows(5, "eval.jsonl", 2, 3),
        supervised=[],
        model_path="m",
    )
    Launch(prepared, RunDirectory(tmp_path), start=(), on_listening=None)._introduce()
    assert capsys.readouterr().out.splitlines()[1:] == [
        "8 prompts from train.jsonl; model m",
        "evaluation: 5 prompts from eval.jsonl, 2 filtered, 3 dropped as too long",
    ]


@pytest.mark.parametrize("is_ended", [False, True], ids=["to the end", "by SIGTERM"])
def test_a_run_gives_its_callers_handler_of_sigterm_back(
    is_ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Mutation: leave it to asyncio -> the default is in its place, and the script's clean-up never runs.
    async def run(*_: Any, **__: Any) -> Path:
        if is_ended:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(30)
        return tmp_path

    def clean_up(*_: Any) -> None: ...

    monkeypatch.setattr(run_module, "run_training", run)
    before = signal.signal(signal.SIGTERM, clean_up)
    try:
        if is_ended:
            with pytest.raises(SystemExit, match="143"):
                run_until_done(Config())
        else:
            assert run_until_done(Config()) == tmp_path
        assert signal.getsignal(signal.SIGTERM) is clean_up
    finally:
        signal.signal(signal.SIGTERM, before)
