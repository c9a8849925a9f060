"""Trackers get everything the run directory gets, and whatever they do, the run neither waits nor fails."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from asyncrl.trackers import delivery
from asyncrl.trackers.delivery import Trackers
from asyncrl.trackers.tracker import Sample, TrackedRun


class Recorder:
    """A tracker that writes down its calls, after what `before` does at each."""

    def __init__(self, before: Callable[[str], None] = lambda call: None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._before = before

    def check(self) -> None:
        pass

    def open(self, run: TrackedRun) -> None:
        self._record("open", run.name, run.project, run.config["max_staleness"])

    def log_metrics(self, version: int, metrics: dict[str, float]) -> None:
        self._record("metrics", version, metrics)

    def log_samples(self, version: int, samples: list[Sample]) -> None:
        self._record("samples", version, samples)

    def close(self, *, succeeded: bool) -> None:
        self._record("close", succeeded)

    def _record(self, *call: Any) -> None:
        self._before(call[0])
        self.calls.append(call)


class Outcome:
    """What was noted, said and counted."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.said: list[str] = []
        self.counts: Counter[str] = Counter()


def track(
    monkeypatch: pytest.MonkeyPatch,
    trackers: dict[str, Recorder],
    body: Callable[[Trackers], None],
    *overrides: str,
) -> Outcome:
    """Runs `body` inside Trackers of these trackers."""
    monkeypatch.setattr(delivery, "load_tracker", trackers.__getitem__)
    config = load_config(
        None,
        [
            f"run.trackers=[{','.join(trackers)}]",
            "run.name=r",
            "run.project=p",
            "max_staleness=3",
            *overrides,
        ],
    )
    outcome = Outcome()

    async def run() -> None:
        async with Trackers(
            config, Path("."), note=outcome.notes.append, counts=outcome.counts, say=outcome.said.append
        ) as tracked:
            body(tracked)

    asyncio.run(run())
    return outcome


def line(version: int, **more: float) -> dict[str, float]:
    return {"training/policy_version": float(version), **more}


def records(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"p{i}", "text": f"t{i}", "reward": float(i), "versions": [i, i + 1]} for i in range(count)
    ]


def test_every_number_and_the_samples_arrive_in_order_under_their_version(monkeypatch: pytest.MonkeyPatch):
    # Mutations: step by the number of the call; leave a name out; close before what waits has been sent.
    tracker = Recorder()

    def body(tracked: Trackers) -> None:
        tracked.metrics_written(line(4, **{"a/b": 0.25}))
        tracked.trajectories_written(4, records(2))
        tracked.metrics_written(line(5, **{"a/b": 0.5}))

    outcome = track(monkeypatch, {"wandb": tracker}, body)
    assert tracker.calls == [
        ("open", "r", "p", 3),
        ("metrics", 4, {"training/policy_version": 4.0, "a/b": 0.25}),
        ("samples", 4, [Sample("p0", "t0", 0.0, "0, 1"), Sample("p1", "t1", 1.0, "1, 2")]),
        ("metrics", 5, {"training/policy_version": 5.0, "a/b": 0.5}),
        ("close", True),
    ]
    assert (outcome.notes, outcome.said, outcome.counts) == ([], [], Counter())


@pytest.mark.parametrize(
    ("wanted", "chosen"), [(8, [0, 2, 4, 6, 8, 10, 12, 14]), (3, [0, 5, 10]), (99, list(range(16))), (0, [])]
)
def test_samples_are_spread_over_the_version(monkeypatch: pytest.MonkeyPatch, wanted: int, chosen: list[int]):
    # Mutation: the first `samples_per_version` rows: all of one prompt where groups are as large.
    tracker = Recorder()
    track(
        monkeypatch,
        {"wandb": tracker},
        lambda tracked: tracked.trajectories_written(1, records(16)),
        f"run.samples_per_version={wanted}",
    )
    tables = [call[2] for call in tracker.calls if call[0] == "samples"]
    assert [sample.prompt for table in tables for sample in table] == [f"p{i}" for i in chosen]
    assert len(tables) == bool(chosen)


def test_a_failing_tracker_is_counted_and_noted_once_and_the_others_get_everything(
    monkeypatch: pytest.MonkeyPatch,
):
    # Mutations: let the exception end the thread -> 1 failure; note every failure -> 3 notes.
    def fail(call: str) -> None:
        if call == "metrics":
            raise ConnectionError("no route to host")

    failing, healthy = Recorder(fail), Recorder()

    def body(tracked: Trackers) -> None:
        for version in (1, 2, 3):
            tracked.metrics_written(line(version))

    outcome = track(monkeypatch, {"wandb": failing, "mlflow": healthy}, body)
    assert outcome.counts == {"tracker_failures": 3}
    assert len(outcome.notes) == 1
    assert "tracker wandb: ConnectionError: no route to host; the run goes on" in outcome.notes[0]
    assert outcome.said == ["tracker wandb: 3 calls failed; the run directory has everything"]
    assert failing.calls == [("open", "r", "p", 3), ("close", True)]
    assert [call[1] for call in healthy.calls if call[0] == "metrics"] == [1, 2, 3]


def test_a_tracker_that_does_not_open_is_called_no_more(monkeypatch: pytest.MonkeyPatch):
    # Mutation: go on calling it -> calls are recorded. What it misses is counted: opening, one line, closing.
    def fail(call: str) -> None:
        if call == "open":
            raise RuntimeError("no account")

    tracker = Recorder(fail)
    outcome = track(monkeypatch, {"wandb": tracker}, lambda tracked: tracked.metrics_written(line(1)))
    assert tracker.calls == []
    assert outcome.counts == {"tracker_failures": 3}
    assert [note.partition(";")[0] for note in outcome.notes] == ["tracker wandb: RuntimeError: no account"]


def test_a_tracker_that_hangs_makes_nobody_wait_beyond_the_deadline(monkeypatch: pytest.MonkeyPatch):
    # Mutations: put with `put` instead of `put_nowait` -> this test hangs at the queue's end, and is ended by
    # pytest's limit; join the thread without a limit -> the same at the end; drop silently -> the count is 0.
    released = threading.Event()
    monkeypatch.setattr(delivery, "QUEUE_CALLS", 4)

    def body(tracked: Trackers) -> None:
        for version in range(10):
            tracked.metrics_written(line(version))

    try:
        outcome = track(
            monkeypatch,
            {"wandb": Recorder(lambda call: assert_released(released))},
            body,
            "timeouts.trackers_s=0.3",
        )
    finally:
        released.set()
    assert outcome.counts == {"tracker_failures": 6}
    assert "tracker wandb: it is 4 calls behind" in outcome.notes[0]
    assert "did not take everything within timeouts.trackers_s = 0.3 s" in outcome.said[0]


def assert_released(released: threading.Event) -> None:
    assert released.wait(60)


def test_a_run_that_failed_is_closed_as_failed(monkeypatch: pytest.MonkeyPatch):
    # Mutation: close(succeeded=True) always.
    tracker = Recorder()

    def body(tracked: Trackers) -> None:
        raise ConfigError("the run failed")

    with pytest.raises(ConfigError, match="the run failed"):
        track(monkeypatch, {"wandb": tracker}, body)
    assert tracker.calls[-1] == ("close", False)
