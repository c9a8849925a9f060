"""Packs whole groups into one row of tokens: the prompt once, then its completions.

The learner calls `pack` for each microbatch of its shard. Only what a trained token depends on is packed: a
completion's tokens after the last trained one, that one itself (nothing is predicted from it), and groups
without a trained token are left out. Nothing of the loss or its gradient changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.errors import LearnerError
from asyncrl.learner.attention import GroupLayout
from asyncrl.types import TrajectoryGroup


@dataclass(slots=True, frozen=True)
class PackedMicrobatch:
    """T packed tokens and the N trained tokens that are predicted from them.

    Example: prompt [5, 6], completions [7, 8, 2] and [9, 2], all trained: token_ids [5, 6, 7, 8, 9],
    position_ids [0, 1, 2, 3, 2], predict_index [1, 2, 3, 1, 4], target_ids [7, 8, 2, 9, 2].
    """

    token_ids: Tensor
    """[T] int64"""
    position_ids: Tensor
    """[T] int64; every completion continues at the prompt's length."""
    layout: GroupLayout
    predict_index: Tensor
    """[N] int64: the packed position whose hidden state predicts each trained token."""
    target_ids: Tensor
    """[N] int64: the trained tokens, trajectory after trajectory."""


def pack(groups: Sequence[TrajectoryGroup], device: torch.device) -> PackedMicrobatch:
    """Packs `groups`.

    Without any trained token the row is one token with nothing to predict: its forward and backward pass keep
    this rank's collectives in step with the others' and add exactly 0 to every gradient.
    """
    row = _Row()
    for group in groups:
        row.append_group(group)
    if not row.groups:
        row.append_tokens(np.zeros(1, np.int32), first_position=0)
        row.groups.append((1, []))
    return PackedMicrobatch(
        token_ids=_tensor(row.token_ids, torch.int64, device),
        position_ids=_tensor(row.position_ids, torch.int64, device),
        layout=GroupLayout(row.groups, device),
        predict_index=_tensor(row.predict_index, torch.int64, device),
        target_ids=_tensor(row.target_ids, torch.int64, device),
    )


class _Row:
    """The packed row while it grows: pieces of each array, end to end."""

    def __init__(self) -> None:
        self.length = 0
        self.groups: list[tuple[int, list[int]]] = []
        self.token_ids: list[np.ndarray] = []
        self.position_ids: list[np.ndarray] = []
        self.predict_index: list[np.ndarray] = []
        self.target_ids: list[np.ndarray] = []

    def append_group(self, group: TrajectoryGroup) -> None:
        if not group.num_trained_tokens:
            return
        prompt_length = len(group.prompt_ids)
        if prompt_length == 0:
            raise LearnerError(
                f"group {group.ordinal} has an empty prompt: nothing predicts the first token of its "
                "completions; give every prompt at least one token"
            )
        self.append_tokens(group.prompt_ids, first_position=0)
        last_prompt_index = self.length - 1
        lengths: list[int] = []
        for trajectory in group.trajectories:
            trained = np.flatnonzero(trajectory.loss_mask)
            if not len(trained):
                continue
            self.predict_index.append(np.where(trained == 0, last_prompt_index, self.length + trained - 1))
            self.target_ids.append(trajectory.token_ids[trained])
            num_packed = int(trained[-1])
            if num_packed:
                self.append_tokens(trajectory.token_ids[:num_packed], first_position=prompt_length)
                lengths.append(num_packed)
        self.groups.append((prompt_length, lengths))

    def append_tokens(self, token_ids: np.ndarray, first_position: int) -> None:
        self.token_ids.append(token_ids)
        self.position_ids.append(np.arange(first_position, first_position + len(token_ids)))
        self.length += len(token_ids)


def _tensor(pieces: list[np.ndarray], dtype: torch.dtype, device: torch.device) -> Tensor:
    whole = np.concatenate(pieces) if pieces else np.empty(0)
    return torch.from_numpy(whole).to(device=device, dtype=dtype)
