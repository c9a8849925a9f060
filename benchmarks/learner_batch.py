"""The batch that learner.py measures on: random tokens, lengths with a long tail, and the work that it amounts to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import AutoConfig

from asyncrl.types import Plan, Shard, Status, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """Lognormal completion lengths, cut at `max_completion_tokens`."""

    num_groups: int = 8
    group_size: int = 8
    prompt_tokens: int = 96
    mean_completion_tokens: float = 64.0
    sigma: float = 0.8
    max_completion_tokens: int = 384
    max_tokens_per_microbatch: int = 4096
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the work of a token depends on."""

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_key_heads: int
    head: int
    """Width of an attention head."""
    vocabulary: int

    @classmethod
    def of(cls, model: Path) -> ModelShape:
        config = AutoConfig.from_pretrained(model)
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            config.hidden_size,
            config.intermediate_size,
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads,
            head,
            config.vocab_size,
        )

    def matrices(self) -> dict[str, tuple[int, int, int]]:
        """Name -> (inputs, outputs, how many) of the matrices that every token goes through."""
        keys = self.num_key_heads * self.head
        return {
            "q": (self.hidden, self.num_heads * self.head, self.num_layers),
            "k, v": (self.hidden, keys, 2 * self.num_layers),
            "o": (self.num_heads * self.head, self.hidden, self.num_layers),
            "gate, up": (self.hidden, self.intermediate, 2 * self.num_layers),
            "down": (self.intermediate, self.hidden, self.num_layers),
        }


@dataclass(frozen=True, slots=True)
class Work:
    """Useful FLOPs of one update: forward and backward, nothing that is done again."""

    body: float
    head: float
    attention: float

    @property
    def total(self) -> float:
        return self.body + self.head + self.attention


def draw_groups(spec: BatchSpec, vocabulary: int) -> list[TrajectoryGroup]:
    """Every completion token trains; rewards differ within every group."""
    rng = np.random.default_rng(spec.seed)
    mu = np.log(spec.mean_completion_tokens) - spec.sigma**2 / 2
    return [
        TrajectoryGroup(
            ordinal,
            0,
            rng.integers(0, vocabulary, spec.prompt_tokens).astype(np.int32),
            [_draw_trajectory(rng, spec, mu, vocabulary) for _ in range(spec.group_size)],
        )
        for ordinal in range(spec.num_groups)
    ]


def _draw_trajectory(rng: np.random.Generator, spec: BatchSpec, mu: float, vocabulary: int) -> Trajectory:
    length = int(np.clip(round(rng.lognormal(mu, spec.sigma)), 1, spec.max_completion_tokens))
    return Trajectory(
        token_ids=rng.integers(0, vocabulary, length).astype(np.int32),
        loss_mask=np.ones(length, np.uint8),
        rollout_logprobs=np.full(length, -11.0, np.float32),
        policy_versions=np.zeros(length, np.int32),
        reward=float(rng.random()),
        status=Status.SCORED,
        finish_reason="stop",
    )


def shard_of(plan: Plan, groups: list[TrajectoryGroup]) -> Shard:
    return Shard(plan, 0, [groups[position] for position in plan.positions_of(0)])


def useful_work(groups: list[TrajectoryGroup], shape: ModelShape) -> Work:
    """design: 6 N_body tokens + 6 V H trained tokens + causal attention; the prompt of a group counts once."""
    tokens = sum(group.num_tokens for group in groups)
    trained = sum(group.num_trained_tokens for group in groups)
    num_body = sum(inputs * outputs * number for inputs, outputs, number in shape.matrices().values())
    pairs = sum(
        len(g.prompt_ids) * (len(g.prompt_ids) + 1) / 2
        + sum(len(t) * len(g.prompt_ids) + len(t) * (len(t) + 1) / 2 for t in g.trajectories)
        for g in groups
    )
    return Work(
        body=6.0 * num_body * tokens,
        head=6.0 * shape.vocabulary * shape.hidden * trained,
        attention=12.0 * shape.num_layers * shape.num_heads * shape.head * pairs,
    )
