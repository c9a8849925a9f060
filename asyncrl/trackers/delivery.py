"""Hands a run's numbers and samples to its trackers, and never waits for one while the run goes on.

Each tracker has a thread and a bounded queue. What a tracker refuses, or has no room for, is counted and the
first such failure shown: the files of the run directory have everything all the same. Used by the launcher:

    async with Trackers(config, directory.path, note=..., counts=..., say=...) as trackers:
        directory.observers.append(trackers)
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import methodcaller
from pathlib import Path
from types import TracebackType
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import one_line
from asyncrl.trackers.tracker import Sample, TrackedRun, Tracker, load_tracker

QUEUE_CALLS = 256
"""What a tracker may be behind: two calls a version."""

Call = Callable[[Tracker], None]


class Trackers:
    """The trackers of `run.trackers`; an observer of the run directory. For one event loop."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        note: Callable[[str], None],
        counts: Counter[str],
        say: Callable[[str], None],
        first_version: int = 0,
    ) -> None:
        """`note`: shows a sentence while the run goes on, `say`: when it has ended. `counts["tracker_failures"]`
        is the number of calls that a tracker did not take. `first_version`: where the run was resumed. Raises
        ConfigError for one that is not installed."""
        self._trackers = {name: load_tracker(name) for name in config.run.trackers}
        self._run = TrackedRun(
            name=str(config.run.name),
            project=config.run.project,
            folder=folder,
            config=config.model_dump(mode="json"),
            close_s=config.timeouts.trackers_s,
            first_version=first_version,
        )
        self._num_samples = config.run.samples_per_version
        self._note, self._counts, self._say = note, counts, say
        self._failures: Counter[str] = Counter()
        self._deliveries: list[Delivery] = []

    async def __aenter__(self) -> Trackers:
        loop = asyncio.get_running_loop()

        def on_failure(name: str, error: str) -> None:
            with suppress(RuntimeError):  # the loop has closed: the deadline of `close` has passed
                loop.call_soon_threadsafe(self._failed, name, error)

        self._deliveries = [
            Delivery(name, tracker, self._run, on_failure) for name, tracker in self._trackers.items()
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Every tracker sends what it has left, all at once, within `timeouts.trackers_s`."""
        deadline_s = time.monotonic() + self._run.close_s
        ended = await asyncio.gather(
            *(
                asyncio.to_thread(delivery.end, deadline_s, succeeded=error is None)
                for delivery in self._deliveries
            )
        )
        for delivery, has_ended in zip(self._deliveries, ended, strict=True):
            if not has_ended:
                self._say(
                    f"tracker {delivery.name} did not take everything within timeouts.trackers_s = "
                    f"{self._run.close_s:g} s; the run directory has it"
                )
            if failures := self._failures[delivery.name]:
                self._say(
                    f"tracker {delivery.name}: {failures} calls failed; the run directory has everything"
                )

    def metrics_written(self, metrics: Mapping[str, float]) -> None:
        self._put(methodcaller("log_metrics", int(metrics["training/policy_version"]), dict(metrics)))

    def trajectories_written(self, version: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Takes samples at equal distances, so that they are of different prompts."""
        num_samples = min(self._num_samples, len(records))
        chosen = [records[i * len(records) // num_samples] for i in range(num_samples)]
        if chosen:
            self._put(methodcaller("log_samples", version, [_sample(record) for record in chosen]))

    def _put(self, call: Call) -> None:
        for delivery in self._deliveries:
            delivery.put(call)

    def _failed(self, name: str, error: str) -> None:
        self._counts["tracker_failures"] += 1
        self._failures[name] += 1
        if self._failures[name] == 1:
            self._note(f"tracker {name}: {error}; the run goes on, counts/tracker_failures has more")


class Delivery:
    """One tracker, the thread that calls it, and what waits for it."""

    def __init__(
        self, name: str, tracker: Tracker, run: TrackedRun, on_failure: Callable[[str, str], None]
    ) -> None:
        """`on_failure(name, error)`: once for every call that failed, from whichever thread."""
        self.name = name
        self._on_failure = on_failure
        self._calls: queue.Queue[Call | None] = queue.Queue(QUEUE_CALLS)
        # A daemon: one that hangs in its vendor's code must not keep the process.
        self._thread = threading.Thread(
            target=self._work, args=(tracker, run), name=f"tracker-{name}", daemon=True
        )
        self._thread.start()

    def put(self, call: Call) -> None:
        """Never waits."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._on_failure(self.name, f"it is {QUEUE_CALLS} calls behind")

    def end(self, deadline_s: float, *, succeeded: bool) -> bool:
        """Closes the tracker after what waits; returns whether it was done by `deadline_s` (monotonic)."""
        with suppress(queue.Full):
            for last in (methodcaller("close", succeeded=succeeded), None):
                self._calls.put(last, timeout=max(0.0, deadline_s - time.monotonic()))
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        return not self._thread.is_alive()

    def _work(self, tracker: Tracker, run: TrackedRun) -> None:
        is_open = self._make(methodcaller("open", run), tracker)
        while (call := self._calls.get()) is not None:
            if is_open:
                self._make(call, tracker)
            else:
                self._on_failure(self.name, "it did not open")

    def _make(self, call: Call, tracker: Tracker) -> bool:
        try:
            call(tracker)
        except Exception as error:  # whatever the vendor's code raises
            self._on_failure(self.name, one_line(error))
            return False
        return True


def _sample(record: Mapping[str, Any]) -> Sample:
    versions = ", ".join(str(version) for version in record["versions"])
    return Sample(record["prompt"], record["text"], record["reward"], versions)
