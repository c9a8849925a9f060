"""`configs/quickstart.yaml` with every built-in recipe: does the reward rise, and after how many versions and seconds?

    python benchmarks/recipes.py                    every recipe, about 5 minutes each on 2 cores
    python benchmarks/recipes.py grpo ppo --seed 1

Needs an otherwise idle machine. Seconds count from when a rollout server holds version 0. A recipe passes when the mean
reward of the last 5 versions is at least GAIN above that of version 1. Prints one JSON object with the rows of
docs/algorithms.md; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import Any

from demos import describe
from machine import describe_machine, package_versions, print_result, use_cores
from runs import REPOSITORY, say, train

from asyncrl.config import load_config
from asyncrl.config.recipes import RECIPES
from asyncrl.models.source import resolve_model

CONFIG = REPOSITORY / "configs" / "quickstart.yaml"
GAIN = 0.3
SHOWN = (1, 2, 4, 6, 8, 10, 12, 14, 16)
"""Versions of the table."""
OPTIONS: dict[str, list[str]] = {"ppo": ["algorithm.critic.lr=1e-4"]}
"""What a recipe needs here besides its name: a critic that starts at 0 has 16 versions to learn the values."""


def run_recipe(name: str, seed: int, folder: Path) -> dict[str, Any]:
    overrides = [f"algorithm={name}", *OPTIONS.get(name, []), f"seed={seed}"]
    config = load_config(CONFIG, overrides)
    finished = train(CONFIG, overrides, folder=folder, name=f"{name}-{seed}", timeout_s=3600)
    result = describe(finished, seed, config.max_staleness)
    rewards, elapsed_s = result.rewards, list(accumulate(finished.column("timing_s/step")))
    first, last = rewards[0], statistics.mean(rewards[-5:])
    say(f"{name}: {first:.2f} -> {last:.2f} in {elapsed_s[-1]:.0f} s")
    return {
        "recipe": name,
        "overrides": overrides,
        "passed": last >= first + GAIN,
        "first_reward": first,
        "last_5_mean": last,
        "target_reached_version": result.target_reached_version,
        "target_reached_s": result.target_reached_s,
        "training_s": elapsed_s[-1],
        "max_staleness": result.max_staleness,
        "counts": result.counts,
        "rewards": rewards,
        "explained_variance": finished.column("critic/vf_explained_var") if name == "ppo" else None,
        "markdown": "| "
        + " | ".join(
            [
                f"`{name}`",
                *(f"{rewards[version - 1]:.2f}" for version in SHOWN if version <= len(rewards)),
                f"{last:.2f}",
                "never" if result.target_reached_s is None else f"{result.target_reached_s:.0f}",
                f"{elapsed_s[-1]:.0f}",
            ]
        )
        + " |",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    use_cores(2)
    resolve_model(load_config(CONFIG).model)
    with tempfile.TemporaryDirectory() as folder:
        rows = [run_recipe(name, arguments.seed, Path(folder)) for name in arguments.recipes]
    print_result(
        {
            "benchmark": "recipes",
            "machine": describe_machine(),
            "packages": package_versions(),
            "rows": rows,
            "passed": all(row["passed"] for row in rows),
        }
    )


if __name__ == "__main__":
    main()
