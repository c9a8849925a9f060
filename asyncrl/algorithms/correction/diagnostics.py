"""How far the policies are apart and what the correction did: sums and maxima, whatever the split of the batch.

Every quantity is a `summary`: count, sum, sum of squares, counts outside its bounds, largest and smallest. Summaries of
microbatches and ranks add up (maxima: the larger), and `report` turns the totals into means, deviations, extremes, the
effective sample size and chi-square. float64 throughout.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncrl.algorithms.correction.statistics import cut
from asyncrl.algorithms.correction.weights import is_above, is_below
from asyncrl.algorithms.segments import Segments


@dataclass(slots=True, frozen=True)
class Diagnostics:
    """Scalars float64 by name. The names depend on the configuration alone, not on the tokens."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    """Add these over microbatches and ranks."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Take the larger over microbatches and ranks; -inf without values."""

    def add_summary(
        self, name: str, values: Tensor, *, lower: float | None = None, upper: float | None = None
    ) -> None:
        """Of values [n]: what `report` needs, and how many are below and above the bounds where there are bounds."""
        values = values.detach().double()
        self.sums[f"{name}/count"] = values.new_tensor(float(len(values)))
        self.sums[f"{name}/sum"] = values.sum()
        self.sums[f"{name}/squares"] = values.square().sum()
        if lower is not None or upper is not None:
            self.sums[f"{name}/below"] = is_below(values, lower).double().sum()
            self.sums[f"{name}/above"] = is_above(values, upper).double().sum()
        lowest = values.new_full((1,), -torch.inf)
        self.maxima[f"{name}/max"] = torch.cat([values, lowest]).max()
        self.maxima[f"{name}/-min"] = torch.cat([-values, lowest]).max()

    def merge(self, other: Diagnostics) -> Diagnostics:
        """Of both token sets together; the names are those of both."""
        return Diagnostics(
            {name: self.sums[name] + other.sums[name] for name in self.sums},
            {name: self.maxima[name].maximum(other.maxima[name]) for name in self.maxima},
        )


def report(diagnostics: Diagnostics, *, sample_std: bool = True) -> dict[str, float]:
    """name/mean, std, max, min, and below, above as shares, of every summary; 0 where there was no value.

    `sample_std` divides by n - 1, else by n.
    `ess` is (sum w)^2 / (n sum w^2), the effective share of the tokens under weights w. `chi2` is the mean square - 1,
    an estimate of the chi-square divergence for ratios. Shares of flags are their mean.
    """
    sums = {name: float(value) for name, value in diagnostics.sums.items()}
    maxima = {name: float(value) for name, value in diagnostics.maxima.items()}
    found: dict[str, float] = {}
    for name in [key.removesuffix("/count") for key in sums if key.endswith("/count")]:
        count, total, squares = (sums[f"{name}/{part}"] for part in ("count", "sum", "squares"))
        n = max(count, 1.0)
        found[f"{name}/mean"] = total / n
        found[f"{name}/std"] = (max(squares - total * total / n, 0.0) / max(count - sample_std, 1.0)) ** 0.5
        found[f"{name}/max"] = maxima[f"{name}/max"] if count else 0.0
        found[f"{name}/min"] = -maxima[f"{name}/-min"] if count else 0.0
        found[f"{name}/ess"] = total * total / (n * squares) if squares else 0.0
        found[f"{name}/chi2"] = squares / n - 1.0 if count else 0.0
        for side in ("below", "above"):
            if f"{name}/{side}" in sums:
                found[f"{name}/{side}"] = sums[f"{name}/{side}"] / n
    return found


def add_mismatch(
    diagnostics: Diagnostics,
    new: Tensor,
    old: Tensor,
    segments: Segments,
    *,
    max_log_ratio: float | None,
    count_empty: bool,
) -> None:
    """Of the corrected policy `new` against the rollout policy `old`, log-probs [N]; names `mismatch/...`.

    k1 and k3 estimate KL(old || new); their log ratios are not cut, those of ratios are. Perplexities are exp of minus
    a trajectory's mean log-prob.
    """
    new, old = new.double(), old.double()
    log_ratio = new - old
    ratio = cut(log_ratio, max_log_ratio).exp()
    rows = counted_trajectories(segments, count_empty=count_empty)
    log_perplexity, rollout_log_perplexity = -segments.mean(new)[rows], -segments.mean(old)[rows]
    difference = log_perplexity - rollout_log_perplexity
    for name, values in {
        "k1": -log_ratio,
        "k3": log_ratio.expm1() - log_ratio,
        "logprob_difference": log_ratio.abs(),
        "ratio": ratio,
        "trajectory_ratio": segments.mean(ratio)[rows],
        "geometric_ratio": (-difference).exp(),
        "sequence_ratio": cut(segments.sum(log_ratio), max_log_ratio)[rows].exp(),
        "perplexity": log_perplexity.exp(),
        "log_perplexity": log_perplexity,
        "rollout_perplexity": rollout_log_perplexity.exp(),
        "rollout_log_perplexity": rollout_log_perplexity,
        "log_perplexity_difference": difference,
        "log_perplexity_distance": difference.abs(),
        "perplexity_ratio": difference.exp(),
    }.items():
        diagnostics.add_summary(f"mismatch/{name}", values)


def counted_trajectories(segments: Segments, *, count_empty: bool) -> Tensor:
    """[R] bool: those that means over trajectories take in."""
    counts = segments.counts()
    return torch.ones_like(counts, dtype=torch.bool) if count_empty else counts > 0
