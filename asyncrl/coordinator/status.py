"""What the run looks like right now: filled by the coordinator, read by the console and by metrics."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.types import Span


@dataclass(slots=True)
class RunStatus:
    """Mutable; one process, one event loop."""

    max_versions: int
    first_version: int = 0
    """What the learner starts with: above 0 in a resumed run."""
    phase: str = "starting"
    """starting | training | ending"""
    version: int = field(init=False)
    recent: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=100))
    """Metrics of the newest versions, the newest last."""
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=100))
    """What a person should see: lost servers, refused messages."""
    num_notes: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Everything that was counted instead of dropped silently."""
    started_s: float = field(default_factory=time.monotonic)
    _version_s: float = field(default_factory=time.monotonic)
    _progress_s: float = field(default_factory=time.monotonic)
    _published: dict[str, float] = field(default_factory=dict)
    _committed: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.version = self.first_version

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.num_notes += 1

    def seconds_since_version(self) -> float:
        """Since the newest version was trained; before the first, since a server held what it begins with."""
        return time.monotonic() - self._version_s

    def seconds_since_progress(self) -> float:
        """Since a group arrived, a version was published or committed, or a batch was trained."""
        return time.monotonic() - self._progress_s

    def record_progress(self) -> None:
        self._progress_s = time.monotonic()

    def record_version(self, version: int, metrics: dict[str, float]) -> None:
        self._version_s = time.monotonic()
        self.record_progress()
        self.phase = "training"
        self.version = version
        self.recent.append(metrics)

    def record_publish(self, version: int, spans: Sequence[Span]) -> None:
        self.record_progress()
        if version == self.first_version:
            self.phase = "training"
        for span in spans:
            self._published[f"weight_sync/{span.name}_s"] = span.end_s - span.start_s
            if "bytes" in span.fields:
                self._published["weight_sync/bytes"] = float(span.fields["bytes"])

    def record_commit(self, version: int, spans: Sequence[Span]) -> None:
        self.record_progress()
        if version == self.first_version:  # a cold sync: no request was held up
            if self.version == version:
                self._version_s = time.monotonic()
            return
        self._committed = {f"weight_sync/{span.name}_s": span.end_s - span.start_s for span in spans}

    def weight_sync_metrics(self) -> dict[str, float]:
        """Of the newest publish and the newest commit: seconds of each part, bytes, and bytes over total.

        The commit may be of the version before: the next one is still on its way when a version is reported.
        """
        metrics = self._published | self._committed
        parts = ("publish", "verify", "pause")  # a pause contains its apply
        total_s = sum(metrics.get(f"weight_sync/{part}_s", 0.0) for part in parts)
        if not self._committed or not total_s:
            return metrics
        num_bytes = metrics.get("weight_sync/bytes", 0.0)
        return metrics | {"weight_sync/total_s": total_s, "weight_sync/gb_per_s": num_bytes / total_s / 1e9}
