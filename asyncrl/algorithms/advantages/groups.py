"""Statistics over the trajectories of one prompt, or of the whole batch: sums, extremes, deviations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Over = Literal["group", "batch"]
"""Which trajectories a statistic is taken over: those of the same prompt, or all of the batch."""
Deviation = Literal["sample", "population", "leave_one_out"]
"""Divides squares by n - 1, by n, or takes the sample deviation of the other trajectories alone."""


@dataclass(slots=True, frozen=True)
class Groups:
    """R trajectories in G groups; groups may be interleaved and of any size."""

    index: Tensor
    """[R] int64, 0..G-1."""
    num_groups: int

    @classmethod
    def of(cls, group_index: Tensor, over: Over = "group") -> Groups:
        """group_index [R] int64 from 0. `batch`: one group of everything."""
        if over == "batch":
            return cls(torch.zeros_like(group_index), 1)
        return cls(group_index, int(group_index.max()) + 1 if len(group_index) else 0)

    def sum(self, values: Tensor) -> Tensor:
        """values [R] -> [R]: the sum over its group, at each trajectory."""
        return values.new_zeros(self.num_groups).index_add(0, self.index, values)[self.index]

    def count(self, values: Tensor) -> Tensor:
        """[R], in the dtype of values: the size of its group."""
        return self.sum(torch.ones_like(values))

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.count(values)

    def max(self, values: Tensor) -> Tensor:
        lowest = values.new_full((self.num_groups,), -torch.inf)
        return lowest.scatter_reduce(0, self.index, values, "amax")[self.index]

    def min(self, values: Tensor) -> Tensor:
        return -self.max(-values)

    def are_equal(self, values: Tensor) -> Tensor:
        """[R] bool: every value of its group is the same. Exact, unlike a deviation of 0."""
        return self.min(values) == self.max(values)

    def leave_one_out_mean(self, values: Tensor) -> Tensor:
        """[R]: the mean of the others of its group; the value itself where there are none."""
        count = self.count(values)
        others = (self.sum(values) - values) / (count - 1).clamp(min=1)
        return torch.where(count > 1, others, values)

    def deviation(self, values: Tensor, kind: Deviation, centre: Tensor | None = None) -> Tensor:
        """[R]: the standard deviation of its group around `centre` [R], by default its mean.

        0 for equal values, and where there are too few: one for `sample`, two for `leave_one_out`.
        """
        mean, count = self.mean(values), self.count(values)
        squares = (values - (mean if centre is None else centre)).square()
        if kind == "leave_one_out":
            # The others' squared distances from their own mean, from sums over all.
            centred = values - mean
            others = self.sum(centred.square()) - centred.square() * count / (count - 1).clamp(min=1)
            variance = torch.where(count > 2, others.clamp(min=0) / (count - 2).clamp(min=1), 0.0)
            return torch.where(self._others_are_equal(values), 0.0, variance.sqrt())
        divisor = count if kind == "population" else (count - 1).clamp(min=1)
        return torch.where(self.are_equal(values), 0.0, (self.sum(squares) / divisor).sqrt())

    def _others_are_equal(self, values: Tensor) -> Tensor:
        """[R] bool: without this trajectory, every value of its group is the same."""
        lowest, highest = self.min(values), self.max(values)
        num_lowest, num_highest = (
            self.sum((values == lowest).double()),
            self.sum((values == highest).double()),
        )
        count = self.count(values.double())
        alone_lowest = (values == lowest) & (num_highest == count - 1)
        alone_highest = (values == highest) & (num_lowest == count - 1)
        return alone_lowest | alone_highest | (lowest == highest)
