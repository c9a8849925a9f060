"""From one loss a token to one number: a weight for each token, and one denominator for the whole mini-batch.

    loss = sum over tokens of weight_t * loss_t / denominator

The weight depends on the token's own trajectory (or group) only, the denominator on counts of the mini-batch over all
its microbatches and ranks. So the sum over microbatches and ranks is the loss of the mini-batch, however it was split
(trajectories whole, and groups whole where the mode is `prompt-mean`). Peers differ in both: see docs of each mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncrl.algorithms.segments import Segments

AggregationMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
]
Denominator = Literal["one", "tokens", "trajectories", "trained_trajectories", "groups"]

DENOMINATOR: dict[AggregationMode, Denominator] = {
    "token-mean": "tokens",
    "token-sum": "one",
    "seq-mean-token-sum": "trajectories",
    "seq-mean-token-mean": "trajectories",
    "seq-mean-token-sum-norm": "trajectories",
    "prompt-mean": "groups",
}
"""What each mode divides by when nothing else is said."""


@dataclass(slots=True, frozen=True)
class Counts:
    """What a mini-batch holds, over all its microbatches and ranks. Sums of integers, so counts of parts add up."""

    tokens: float
    """Tokens that train."""
    trajectories: float
    """All, also those without a token that trains. The learner counts no failed rollout, which is in no mean."""
    trained_trajectories: float
    """Those with a token that trains."""
    groups: float
    """Groups with a token that trains."""

    @classmethod
    def of(cls, segments: Segments, group_index: Tensor | None = None) -> Counts:
        """group_index [R] int64; without it each trajectory is a group of its own."""
        trained = segments.counts() > 0
        groups = trained.sum() if group_index is None else group_index[trained].unique().numel()
        return cls(
            tokens=float(len(segments.index)),
            trajectories=float(segments.num_trajectories),
            trained_trajectories=float(trained.sum()),
            groups=float(groups),
        )

    def tensor(self, device: torch.device) -> Tensor:
        """[4] float64, in the order of the fields: for an all-reduce."""
        fields = [self.tokens, self.trajectories, self.trained_trajectories, self.groups]
        return torch.tensor(fields, dtype=torch.float64, device=device)

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.tokens + other.tokens,
            self.trajectories + other.trajectories,
            self.trained_trajectories + other.trained_trajectories,
            self.groups + other.groups,
        )


def aggregation_weights(
    segments: Segments,
    *,
    mode: AggregationMode,
    length: float | None = None,
    group_index: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weight of each token [N], before the denominator.

    token-mean, token-sum, seq-mean-token-sum    1
    seq-mean-token-mean       1 / trained tokens of its trajectory (GRPO: arXiv:2402.03300)
    seq-mean-token-sum-norm   1 / length, a constant such as the longest completion (Dr.GRPO: arXiv:2503.20783)
    prompt-mean               1 / trained tokens of its group; `group_index` [R]
    """
    if mode == "seq-mean-token-sum-norm":
        if length is None:
            raise ValueError("seq-mean-token-sum-norm divides by a constant length: none was given")
        return segments.index.new_full(segments.index.shape, 1, dtype=dtype) / length
    if mode == "seq-mean-token-mean":
        return segments.spread(segments.counts().clamp(min=1).to(dtype).reciprocal())
    if mode == "prompt-mean":
        if group_index is None:
            raise ValueError("prompt-mean needs the group of each trajectory")
        group = segments.spread(group_index)
        return torch.bincount(group)[group].to(dtype).reciprocal()
    return segments.index.new_full(segments.index.shape, 1, dtype=dtype)


def denominator(
    counts: Counts,
    *,
    mode: AggregationMode,
    divide_by: Denominator | float | None = None,
    at_least: float = 1.0,
) -> float:
    """What the weighted sum is divided by.

    divide_by: None, what the mode says (DENOMINATOR); a count by name; or a number.
    at_least: no count is taken smaller. 1, the default, makes the loss of a mini-batch without a token 0 (TRL,
    open-instruct); 0 makes it NaN (verl, OpenRLHF), which the gradient norm then refuses.
    """
    divide_by = DENOMINATOR[mode] if divide_by is None else divide_by
    if not isinstance(divide_by, str):
        return divide_by
    return 1.0 if divide_by == "one" else max(getattr(counts, divide_by), at_least)


def aggregate(
    values: Tensor,
    segments: Segments,
    *,
    mode: AggregationMode,
    length: float | None = None,
    divide_by: Denominator | float | None = None,
    at_least: float = 1.0,
    counts: Counts | None = None,
    group_index: Tensor | None = None,
) -> Tensor:
    """values [N] -> scalar: this part's share of the mini-batch's loss, with gradient.

    counts: of the whole mini-batch; None where these tokens are all of it.
    """
    weights = aggregation_weights(
        segments, mode=mode, length=length, group_index=group_index, dtype=values.dtype
    )
    counts = counts or Counts.of(segments, group_index)
    total = (weights * values).sum()
    return total / total.new_tensor(denominator(counts, mode=mode, divide_by=divide_by, at_least=at_least))
