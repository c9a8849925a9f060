"""Metrics of one version while it is trained: sums, counts and maxima, so that no split of the batch changes them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.algorithms.correction import Diagnostics, report

REPORTED = {
    "mismatch/k1": "mismatch/k1/mean",
    "mismatch/k3": "mismatch/k3/mean",
    "mismatch/logprob_diff_max": "mismatch/logprob_difference/max",
    "mismatch/ess": "mismatch/ratio/ess",
    "mismatch/chi2": "mismatch/ratio/chi2",
    "mismatch/sequence_chi2": "mismatch/sequence_ratio/chi2",
    "correction/weight_mean": "weight/applied/mean",
    "correction/weight_max": "weight/applied/max",
    "correction/truncated_share": "weight/moved/mean",
    "correction/rejected_share": "rejection/rejected_token/mean",
    "correction/rejected_trajectory_share": "rejection/rejected_trajectory/mean",
}
"""Metric -> what it is called among the diagnostics of the correction."""


class Totals:
    """Of this rank, over all steps of a version. Every rank adds the same names in the same order."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, float] = {}
        self._shares: dict[str, Tensor] = {}
        self._diagnostics = Diagnostics()

    def add_mean(self, name: str, values: Tensor) -> None:
        """Values [n]: reported is the mean over all there were."""
        self._add(name, values.detach().double().sum(), float(len(values)))

    def add_share(self, name: str, share: Tensor) -> None:
        """What a microbatch adds to a part of the loss of the step that is going on."""
        share = share.detach().double()
        self._shares[name] = self._shares[name] + share if name in self._shares else share

    def close_step(self, *, scale: float, step_tokens: float, own_tokens: float) -> None:
        """The step's loss is `scale` times its shares over all ranks. Steps are averaged by the tokens they train:
        `step_tokens` over all ranks, of which this rank's are `own_tokens`."""
        for name, share in self._shares.items():
            self._add(name, share * (scale * step_tokens), own_tokens)
        self._shares.clear()

    def add_diagnostics(self, diagnostics: Diagnostics) -> None:
        """Of a microbatch."""
        self._diagnostics = self._diagnostics.merge(diagnostics) if self._diagnostics.sums else diagnostics

    def reduce(self, group: dist.ProcessGroup, device: torch.device) -> dict[str, float]:
        """Over all ranks; without diagnostics where only a critic was trained. Collective."""
        diagnostics = self._diagnostics
        sums = [*self._sums.values(), *diagnostics.sums.values()]
        counts = torch.tensor(list(self._counts.values()), dtype=torch.float64, device=device)
        added = torch.cat([torch.stack(sums).to(device), counts])
        dist.all_reduce(added, group=group)
        maxima = torch.empty(0)
        if diagnostics.maxima:
            maxima = torch.stack(list(diagnostics.maxima.values())).to(device)
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        num_means = len(self._sums)
        means = added[:num_means] / added[len(sums) :].clamp(min=1)
        merged = Diagnostics(
            dict(zip(diagnostics.sums, added[num_means : len(sums)], strict=True)),
            dict(zip(diagnostics.maxima, maxima, strict=True)),
        )
        found = report(merged)
        by_staleness = {
            name.removesuffix("/mean"): value
            for name, value in found.items()
            if "/staleness_" in name
            and name.endswith("/mean")
            and float(merged.sums[name.removesuffix("mean") + "count"])  # of ages that a token has
        }
        return (
            dict(zip(self._sums, means.tolist(), strict=True))
            | {metric: found[name] for metric, name in REPORTED.items() if name in found}
            | by_staleness
        )

    def _add(self, name: str, total: Tensor, count: float) -> None:
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._counts[name] = self._counts.get(name, 0.0) + count
