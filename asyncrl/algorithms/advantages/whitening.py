"""Mean 0 and deviation 1 over all trained tokens of a batch, from sums that ranks can add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

WhitenEpsilon = Literal["variance", "std", "variance_floor"]
"""sqrt(variance + epsilon); sqrt(variance) + epsilon; sqrt(max(variance, epsilon))."""


@dataclass(slots=True, frozen=True)
class Moments:
    """Count, sum and sum of squares of values that may be spread over microbatches and ranks.

    `Moments(a.sums + b.sums)` are the moments of both; across ranks, all-reduce `sums` (SUM). float64, so
    that the variance keeps 8 digits while the mean is within 1e4 deviations of 0.
    """

    sums: Tensor
    """[3] float64"""

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        """values of any shape; none at all is well defined."""
        values = values.double()
        return cls(torch.stack([values.new_tensor(values.numel()), values.sum(), values.square().sum()]))

    @property
    def count(self) -> Tensor:
        return self.sums[0]

    @property
    def mean(self) -> Tensor:
        """0 of no values."""
        return self.sums[1] / self.count.clamp(min=1)

    def variance(self, *, sample: bool = True) -> Tensor:
        """Squares over n - 1 (`sample`) or n; 0 of fewer than two values, and of equal ones.

        Equal values: what is left of their squares is rounding of the sums, up to a few parts in 2^52.
        """
        squares = self.sums[2] - self.sums[1].square() / self.count.clamp(min=1)
        rounding = 8 * torch.finfo(torch.float64).eps * self.sums[2]
        squares = torch.where(squares <= rounding, 0.0, squares)
        return squares / (self.count - int(sample)).clamp(min=1)


def whiten(
    values: Tensor,
    moments: Moments,
    *,
    shift_mean: bool = True,
    deviation: Literal["sample", "population", "none"] = "sample",
    epsilon: float = 1e-8,
    epsilon_in: WhitenEpsilon = "variance",
) -> Tensor:
    """(values - mean) / std with the moments of the whole batch; values of any shape -> the same, their dtype.

    `shift_mean` False divides only the spread: values - mean is scaled and the mean added back. `deviation` none
    only shifts. Equal values
    are exactly at the mean: 0, or the mean. A NaN anywhere makes every value NaN, on every rank.
    """
    variance = moments.variance(sample=deviation == "sample")
    if deviation == "none":
        scale = torch.ones_like(variance)
    elif epsilon_in == "std":
        scale = variance.sqrt() + epsilon
    elif epsilon_in == "variance_floor":
        scale = variance.clamp(min=epsilon).sqrt()
    else:
        scale = (variance + epsilon).sqrt()
    centred = torch.where(variance == 0, 0.0, (values.double() - moments.mean) / scale)
    return (centred if shift_mean else centred + moments.mean).to(values.dtype)
