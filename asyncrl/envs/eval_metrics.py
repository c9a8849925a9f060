"""The numbers of an evaluation: mean@N, best@N, worst@N, maj@N and pass@k, by data source. Numpy only.

verl's numbers under verl's names (its `process_validation_metrics`), so that curves of both can be laid side by
side, and pass@k besides. Golden values hold them (tests/envs/test_eval_metrics.py). eval_report.py is the caller.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

BOOTSTRAP_SEED = 42
NUM_DRAWS = 1000


@lru_cache(maxsize=64)
def bootstrap_draws(num_samples: int, subset_size: int) -> NDArray[np.int64]:
    """[NUM_DRAWS, subset_size] samples by index, with replacement: the same for every prompt, as in verl."""
    draws = np.random.RandomState(BOOTSTRAP_SEED).randint(0, num_samples, size=(NUM_DRAWS, subset_size))
    return draws.astype(np.int64, copy=False)


def majority_samples(votes: Sequence[Hashable], draws: NDArray[np.int64]) -> NDArray[np.int64]:
    """[D] of each of the draws [D, n] the first sample with the most frequent vote; of equally frequent votes the
    one that was drawn first."""
    codes = np.array([votes.index(vote) for vote in votes])[draws]
    counts = (codes[:, :, None] == codes[:, None, :]).sum(axis=2, dtype=np.int32)
    return np.take_along_axis(draws, counts.argmax(axis=1)[:, None], axis=1)[:, 0]


def subset_sizes(num_samples: int) -> list[int]:
    """2, 4, 8, ... below the number of samples, then that number; nothing for one sample."""
    powers = [1 << exponent for exponent in range(1, num_samples.bit_length()) if 1 << exponent < num_samples]
    return [*powers, num_samples] if num_samples > 1 else []


def prompt_metrics(values: Sequence[float], votes: Sequence[Hashable] | None = None) -> dict[str, float]:
    """One variable of one prompt's N samples: mean@N, std@N, and bootstrap means and deviations of best@n,
    worst@n and (with votes) maj@n for n in `subset_sizes(N)`."""
    num_samples = len(values)
    array = np.asarray(values, np.float64)
    metrics = {f"mean@{num_samples}": float(array.mean())}
    if num_samples > 1:
        metrics[f"std@{num_samples}"] = float(array.std())
    for size in subset_sizes(num_samples):
        draws = bootstrap_draws(num_samples, size)
        reduced = {"best": array[draws].max(axis=1), "worst": array[draws].min(axis=1)}
        if votes is not None:
            reduced["maj"] = array[majority_samples(votes, draws)]
        for name, results in reduced.items():
            metrics[f"{name}@{size}/mean"] = float(results.mean())
            metrics[f"{name}@{size}/std"] = float(results.std())
    return metrics


def pass_at_k(num_correct: Sequence[int], num_samples: int) -> dict[int, float]:
    """Unbiased pass@k for k = 1, 2, 4, ... up to N: the mean over prompts of 1 - C(N - c, k) / C(N, k), where c of
    a prompt's N samples are correct (arXiv:2107.03374, equation 1)."""
    sizes = [1, *(size for size in subset_sizes(num_samples) if size & (size - 1) == 0)]
    return {
        k: float(
            np.mean([1.0 - math.comb(num_samples - c, k) / math.comb(num_samples, k) for c in num_correct])
        )
        for k in sizes
    }


def source_metrics(
    variables: Mapping[str, Sequence[Sequence[float]]], votes: Sequence[Sequence[Hashable]] | None = None
) -> dict[str, dict[str, float]]:
    """variable -> metric -> value of one data source. `variables`: [prompt][sample], every prompt with N samples.

    A metric is the mean of the prompts' metrics. pass@k is given for variables that are 0 or 1 everywhere.
    """
    metrics: dict[str, dict[str, float]] = {}
    for name, prompts in variables.items():
        each = [prompt_metrics(v, votes[i] if votes else None) for i, v in enumerate(prompts)]
        metrics[name] = {metric: float(np.mean([m[metric] for m in each])) for metric in each[0]}
        if all(value in (0.0, 1.0) for values in prompts for value in values):
            correct = [round(sum(values)) for values in prompts]
            metrics[name] |= {f"pass@{k}": v for k, v in pass_at_k(correct, len(prompts[0])).items()}
    return metrics


def flat_metrics(by_source: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """`val-core/<source>/<variable>/<metric>` and `val-aux/...`, verl's names.

    Core: mean@N, best@N and maj@N of the most samples, of the variable `acc` where there is one, else `reward`.
    """
    flat: dict[str, float] = {}
    for source, variables in by_source.items():
        core = "acc" if "acc" in variables else "reward"
        for variable, metrics in variables.items():
            most = max(_num_samples(name) for name in metrics)
            for name, value in metrics.items():
                is_core = (
                    variable == core
                    and name.startswith(("mean@", "best@", "maj@"))
                    and _num_samples(name) == most
                )
                flat[f"{'val-core' if is_core else 'val-aux'}/{source}/{variable}/{name}"] = value
    return flat


def _num_samples(metric: str) -> int:
    """best@8/mean -> 8"""
    return int(metric.partition("@")[2].partition("/")[0])
