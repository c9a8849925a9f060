"""Which trajectory each flat token belongs to: how formulas sum over a sequence without padding or a mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, frozen=True)
class Segments:
    """N trained tokens of R trajectories, in the order in which they were sampled, trajectory after trajectory.

    Tokens that do not train (prompt, observations, padding) are not there: no formula can read them. Sums are
    `index_add`, so they carry gradients and no value of another trajectory touches a sum, be it inf or NaN.
    """

    index: Tensor
    """[N] int64, not decreasing: the trajectory of each token, 0..R-1."""
    num_trajectories: int
    """R. A trajectory without a trained token has no entry in `index` and still counts here."""

    @classmethod
    def of_counts(cls, counts: list[int] | Tensor) -> Segments:
        """counts [R]: trained tokens of each trajectory."""
        counts = torch.as_tensor(counts, dtype=torch.int64)
        rows = torch.arange(len(counts), device=counts.device)
        return cls(rows.repeat_interleave(counts), len(counts))

    def counts(self) -> Tensor:
        """[R] int64: trained tokens of each trajectory."""
        return torch.bincount(self.index, minlength=self.num_trajectories)

    def sum(self, values: Tensor) -> Tensor:
        """values [N] -> [R], in their dtype; 0 for a trajectory without tokens."""
        return values.new_zeros(self.num_trajectories).index_add(0, self.index, values)

    def mean(self, values: Tensor) -> Tensor:
        """values [N] -> [R]; 0 for a trajectory without tokens."""
        return self.sum(values) / self.counts().clamp(min=1)

    def max(self, values: Tensor) -> Tensor:
        """values [N] -> [R]; -inf for a trajectory without tokens."""
        lowest = values.new_full((self.num_trajectories,), -torch.inf)
        return lowest.scatter_reduce(0, self.index, values, "amax")

    def min(self, values: Tensor) -> Tensor:
        """values [N] -> [R]; inf for a trajectory without tokens."""
        return -self.max(-values)

    def spread(self, values: Tensor) -> Tensor:
        """values [R] -> [N]: each trajectory's value at each of its tokens."""
        return values[self.index]
