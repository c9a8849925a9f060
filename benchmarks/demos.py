"""The demonstrations, as a user would start them, on several seeds: do they learn in the time they promise?

    python benchmarks/demos.py --config tiny                       about 6 minutes on 2 cores
    python benchmarks/demos.py --config quickstart                 about 15 minutes
    python benchmarks/demos.py --config tiny quickstart --seeds 0 1 2

Needs an otherwise idle machine; the model is made or fetched before the first run. Training starts when a
rollout server holds version 0. A reward is the mean over one version's trajectories; the target is reached
when the mean of three versions in a row passes it. Prints one JSON object; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from machine import describe_machine, package_versions, print_result, use_cores
from runs import REPOSITORY, FinishedRun, say, train

from asyncrl.config import load_config
from asyncrl.models.source import resolve_model

TARGET = 0.85
WINDOW = 3
"""Versions in a row whose mean reward must pass TARGET."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a demonstration promises on every seed."""

    config: str
    first_reward_under: float
    target_within_s: float
    """Seconds from the start of training until the target is reached."""
    whole_training_within_s: float | None
    """Seconds from the start of training to its last version, where that is promised too."""

    def broken_by(self, result: SeedResult) -> list[str]:
        """The promises that a run did not keep."""
        first, reached_s = result.first_reward, result.target_reached_s
        kept = {
            f"reward {first:.3f} of the first version is under {self.first_reward_under}": first
            < self.first_reward_under,
            f"{WINDOW} versions over {TARGET} within {self.target_within_s} s (reached: {reached_s})": reached_s
            is not None
            and reached_s <= self.target_within_s,
            f"staleness {result.max_staleness} of every trained token within {result.staleness_bound}": (
                result.max_staleness <= result.staleness_bound
            ),
        }
        if (limit_s := self.whole_training_within_s) is not None:
            promise = f"all versions within {limit_s} s (took {result.training_s:.1f})"
            kept[promise] = result.training_s <= limit_s
        return [promise for promise, is_kept in kept.items() if not is_kept]


DEMANDS = {
    "tiny": Demand("configs/tiny.yaml", 0.3, target_within_s=120.0, whole_training_within_s=120.0),
    "quickstart": Demand("configs/quickstart.yaml", 0.5, target_within_s=300.0, whole_training_within_s=None),
}


@dataclass(frozen=True, slots=True)
class SeedResult:
    """What one run did."""

    seed: int
    versions: int
    first_reward: float
    first_3_mean: float
    last_5_mean: float
    target_reached_s: float | None
    """None: never."""
    target_reached_version: int | None
    training_s: float
    """From the start of training to the last version."""
    total_s: float
    """From the command to its end."""
    max_staleness: float
    """Over all trained tokens."""
    staleness_bound: int
    failed_trajectories: int
    counts: dict[str, int]
    """Everything the run counted, as in the last version's metrics."""
    rewards: list[float]


def run_seed(config_file: Path, seed: int, folder: Path) -> SeedResult:
    """One run on one seed."""
    config = load_config(config_file, [f"seed={seed}"])
    name = f"{config_file.stem}-{seed}"
    finished = train(config_file, [f"seed={seed}"], folder=folder, name=name, timeout_s=3600)
    result = describe(finished, seed, config.max_staleness)
    say(
        f"{name}: {result.first_reward:.2f} -> {result.last_5_mean:.2f}, target at {result.target_reached_s} s"
    )
    return result


def describe(finished: FinishedRun, seed: int, staleness_bound: int) -> SeedResult:
    """A run's figures. The first version's `timing_s/step` counts from when a server held version 0."""
    rewards = finished.column("critic/score/mean")
    elapsed_s = list(accumulate(finished.column("timing_s/step")))
    reached = first_window_over(rewards, TARGET)
    last = finished.metrics[-1]
    return SeedResult(
        seed=seed,
        versions=len(rewards),
        first_reward=rewards[0],
        first_3_mean=statistics.mean(rewards[:3]),
        last_5_mean=statistics.mean(rewards[-5:]),
        target_reached_s=None if reached is None else elapsed_s[reached],
        target_reached_version=None if reached is None else reached + 1,
        training_s=elapsed_s[-1],
        total_s=finished.total_s,
        max_staleness=max(finished.column("staleness/max")),
        staleness_bound=staleness_bound,
        failed_trajectories=int(sum(finished.column("rollout/failed"))),
        counts={k.removeprefix("counts/"): int(v) for k, v in last.items() if k.startswith("counts/")},
        rewards=rewards,
    )


def first_window_over(rewards: Sequence[float], target: float) -> int | None:
    """Index of the last of the first WINDOW rewards in a row whose mean is over `target`."""
    for end in range(WINDOW, len(rewards) + 1):
        if statistics.mean(rewards[end - WINDOW : end]) > target:
            return end - 1
    return None


def run_demo(name: str, seeds: Sequence[int], folder: Path) -> dict[str, Any]:
    """Every seed of one demonstration, and the promises that were broken."""
    demand = DEMANDS[name]
    config_file = REPOSITORY / demand.config
    resolve_model(load_config(config_file).model)
    results = [run_seed(config_file, seed, folder) for seed in seeds]
    broken = {str(result.seed): demand.broken_by(result) for result in results}
    return {
        "demand": asdict(demand),
        "seeds": [asdict(result) for result in results],
        "broken": {seed: promises for seed, promises in broken.items() if promises},
        "passed": not any(broken.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", nargs="+", choices=DEMANDS, default=["tiny"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--cores", type=int, default=2, help="cores that a run may use")
    arguments = parser.parse_args()
    about = {"machine": describe_machine(), "versions": package_versions()}
    use_cores(arguments.cores)
    with tempfile.TemporaryDirectory(prefix="asyncrl-demos-") as folder:
        demos = {name: run_demo(name, arguments.seeds, Path(folder)) for name in arguments.config}
    what = (
        f"`asyncrl train` on each configuration and seed, on {arguments.cores} cores; the target is a mean reward "
        f"over {TARGET} of {WINDOW} versions in a row, timed from when a rollout server held version 0"
    )
    print_result({"what": what, **about, "target": TARGET, "demos": demos})


if __name__ == "__main__":
    main()
