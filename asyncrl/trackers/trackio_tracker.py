"""trackio: local by default (`trackio show`); TRACKIO_SPACE_ID or TRACKIO_SERVER_URL send it elsewhere."""

from __future__ import annotations

import trackio  # pyright: ignore[reportMissingImports]

from asyncrl.trackers.tracker import Sample, TrackedRun


class TrackioTracker:
    """One run of the project; samples are a table a version."""

    def check(self) -> None:
        pass

    def open(self, run: TrackedRun) -> None:
        self._run = trackio.init(
            run.project,
            name=run.name,
            config=run.config,
            resume="allow" if run.first_version else "never",
            embed=False,
            auto_log_gpu=False,  # its monitors would run in the coordinator's process
            auto_log_cpu=False,
        )

    def log_metrics(self, version: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=version)

    def log_samples(self, version: int, samples: list[Sample]) -> None:
        table = trackio.Table(columns=list(Sample._fields), data=[list(sample) for sample in samples])
        self._run.log({"samples": table}, step=version)

    def close(self, *, succeeded: bool) -> None:
        self._run.finish()


TRACKER = TrackioTracker
