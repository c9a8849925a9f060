"""A batch, the models that train it, and what the tests of recipes compare (plain_loop.py has the plain loops)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from flow_cases import (
    HALVES,
    REJECTION,
    Scenario,
    near_groups,
    random_heads,
    shard_for,
    trained_weights,
    write_models,
)
from learner_cases import one_rank, plain_model
from plain_loop import PlainBatch, clipped, plain_batch, plain_training
from torch import Tensor

from asyncrl.learner.update import PolicyLearner
from asyncrl.types import Shard, TrajectoryGroup


@dataclass
class Flow:
    """Models on disk, and the halves of the batch that is trained on them."""

    folder: Path
    model_path: Path
    groups: list[TrajectoryGroup]

    @classmethod
    def at(cls, folder: Path) -> Flow:
        """Everything is made in `folder`."""
        model_path = write_models(folder)
        return cls(folder, model_path, near_groups(model_path))

    @contextmanager
    def learner(self, scenario: Scenario) -> Iterator[PolicyLearner]:
        """On one rank, its value head with an opinion."""
        store = self.folder / f"store{next(STORES)}"
        with random_heads(), one_rank(self.model_path, scenario.config(self.model_path), store) as learner:
            yield learner

    @property
    def halves(self) -> list[list[TrajectoryGroup]]:
        return [
            [self.groups[p] for microbatch in of_ranks[0] for p in microbatch] for of_ranks in HALVES["whole"]
        ]

    def train(
        self, scenario: Scenario, split: str = "whole", edit: Callable[[Shard], object] | None = None
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """(all weights, metrics) after one batch."""
        with self.learner(scenario) as learner:
            shard = shard_for(scenario, self.groups, HALVES[split])
            if edit is not None:
                edit(shard)
            metrics = learner.update(shard)
            return trained_weights(learner), metrics

    def at_start(self) -> list[PlainBatch]:
        """The tokens of each half before the first step."""
        model = plain_model(self.model_path)
        with torch.no_grad():
            return [plain_batch(model, half, 0.7) for half in self.halves]


STORES = count()
"""Of process groups: each needs a file of its own."""


def assert_trained(
    flow: Flow, found: dict[str, Tensor], expected: dict[str, Tensor], prefix: str = "policy.transformer."
) -> None:
    """Each tensor's error against how far it has moved from the model on disk; none where it has not moved."""
    before = {name: p.detach() for name, p in plain_model(flow.model_path).named_parameters()}
    assert expected
    for name, value in expected.items():
        moved = (value - before[name if name in before else f"model.{name}"]).norm()
        assert (found[f"{prefix}{name}"] - value).norm() <= 1e-3 * moved, name


def tis(before: PlainBatch) -> Tensor:
    """Truncated importance weights, the default correction."""
    return (before.logprobs - before.rollout).exp().clamp(max=2.0)


def default_loss(now: PlainBatch, before: PlainBatch, advantages: Tensor) -> Tensor:
    """Clipped ratios, truncated importance weights, the mini-batch's token mean."""
    return (clipped(now, before.logprobs, advantages) * tis(before)).mean()


def plainly_trained(flow: Flow, advantages: Callable[[PlainBatch], Tensor]) -> dict[str, Tensor]:
    """Weights after two epochs of the default loss; `advantages` of the tokens of a half before the first step."""
    return plain_training(
        flow.model_path, flow.halves, default_loss, advantages=advantages, num_epochs=2, lr=0.05
    )


def whitened(parts: Sequence[Tensor]) -> list[Tensor]:
    """Of all tokens together."""
    whole = torch.cat(list(parts)).double()
    return [((p.double() - whole.mean()) / (whole.var() + 1e-8).sqrt()).float() for p in parts]


def sequence_mean(batch: PlainBatch, values: Tensor) -> Tensor:
    """[N]: at each token the mean over its trajectory."""
    found = torch.zeros_like(values)
    for row in batch.rows():
        if len(row):
            found[row] = values[row].mean()
    return found


def kept_by_k3(before: PlainBatch) -> Tensor:
    """[N] bool, REJECTION: the mean k3 of proximal to rollout over a trajectory."""
    log_ratio = before.logprobs - before.rollout
    return sequence_mean(before, log_ratio.expm1() - log_ratio) <= REJECTION["upper"]
