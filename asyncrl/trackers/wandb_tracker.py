"""Weights & Biases. Its own variables say the rest: WANDB_MODE=offline, WANDB_ENTITY, WANDB_DIR, ..."""

from __future__ import annotations

import wandb  # pyright: ignore[reportMissingImports]

from asyncrl.errors import ConfigError
from asyncrl.trackers.tracker import Sample, TrackedRun

STEP = "training/policy_version"
"""The x axis of every chart."""
NEEDS_NO_LOGIN = {"offline", "dryrun", "disabled"}


class WandbTracker:
    """One run of the project; samples are a table with one page a version."""

    def check(self) -> None:
        """An account, or offline: W&B would ask for a key in the middle of the run."""
        is_online = wandb.setup().settings.mode not in NEEDS_NO_LOGIN
        if is_online and not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "run.trackers: wandb has no API key; run `wandb login`, or set WANDB_MODE=offline and upload "
                "later with `wandb sync`"
            )

    def open(self, run: TrackedRun) -> None:
        settings = wandb.Settings(console="off", init_timeout=run.close_s, finish_timeout=run.close_s)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.stored_id("wandb"),
            resume="allow" if run.first_version else None,
            config=run.config,
            settings=settings,
        )
        run.store_id("wandb", self._run.id)
        # Not W&B's own step, which may not go back: an evaluation ends when later versions are trained.
        self._run.define_metric("*", step_metric=STEP)

    def log_metrics(self, version: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics | {STEP: version})

    def log_samples(self, version: int, samples: list[Sample]) -> None:
        table = wandb.Table(columns=list(Sample._fields), data=[list(sample) for sample in samples])
        self._run.log({"samples": table, STEP: version})

    def close(self, *, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)


TRACKER = WandbTracker
