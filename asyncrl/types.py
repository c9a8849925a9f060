"""The records that travel between processes, and the words for them.

| word | meaning |
|---|---|
| Prompt | one data set row, tokenised with the chat template |
| ordinal | a group's position in the endless data order |
| rollout | the act of generating and scoring; never the record |
| Trajectory | the record of one rollout |
| TrajectoryGroup | the trajectories of one prompt: the unit of leasing, batching and packing |
| completion | the sampled tokens of one turn |
| policy version | an integer: 0 is the initial model, +1 each time the learner publishes |
| staleness | of a token in batch i: i minus the version that sampled it |
| batch | what makes one version: its mini-batches are one optimizer step each, a microbatch is one forward-backward |
| lease | the coordinator's grant of one group to one rollout server |

Shapes: `P` tokens of a prompt, `T` tokens of a trajectory after its prompt, `G` trajectories of a group.
Numpy only: every process imports this file, and the coordinator has no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
UInt8 = NDArray[np.uint8]


MAX_ABS_REWARD = 1e30
"""Rewards beyond it are failures: their squares would not be finite in float32's range."""

MAX_DETAIL_CHARACTERS = 2000
"""Of a trajectory's detail: whoever makes it cuts it."""


class Status(StrEnum):
    """How a rollout ended. Only SCORED has a reward; the others are counted, never scored 0."""

    SCORED = "scored"
    REWARD_FAILED = "reward_failed"
    """The reward raised, or returned something that is not a finite number."""
    REWARD_TIMEOUT = "reward_timeout"
    """The reward ran past `timeouts.reward_s` and its process was killed."""
    ABORTED = "aborted"
    """The engine ended the request without finishing it."""


@dataclass(slots=True, frozen=True)
class Prompt:
    """One data set row at one position of the data order."""

    ordinal: int
    token_ids: Int32
    """[P]"""
    row: dict[str, Any]
    """The row's columns as JSON values: what the reward is given."""


@dataclass(slots=True)
class Trajectory:
    """The record of one rollout. Token ids and their log-probs are the record; text is for display.

    Example: token_ids [7, 9, 2], loss_mask [1, 1, 1], rollout_logprobs [-0.1, -1.2, -0.01],
    policy_versions [3, 3, 4], reward 1.0: the third token was sampled after an update in flight.
    """

    token_ids: Int32
    """[T] everything after the prompt."""
    loss_mask: UInt8
    """[T] 1 where the token trains."""
    rollout_logprobs: Float32
    """[T] log-prob of each token under the distribution that sampled it (the behaviour policy)."""
    policy_versions: Int32
    """[T] the version whose weights sampled each token."""
    reward: float | None
    """None unless status is SCORED."""
    status: Status
    finish_reason: str
    """As the engine reports it: "stop", "length" or "abort"."""
    text: str = ""
    detail: str = ""
    """Why there is no reward, on one line."""
    reward_components: dict[str, float] = field(default_factory=dict)
    """What each reward gave, by its label and before its weight; empty unless status is SCORED."""
    shaped_reward: float | None = None
    """What it is trained with, where the recipe shapes rewards; the coordinator's own, never on the wire."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def trained_reward(self) -> float | None:
        """After shaping, if there is any."""
        return self.reward if self.shaped_reward is None else self.shaped_reward


class Span(msgspec.Struct, frozen=True):
    """One stretch of time that a process spent on one thing (for events.jsonl)."""

    name: str
    start_s: float
    """CLOCK_MONOTONIC seconds of the host that measured it."""
    end_s: float
    fields: Mapping[str, str | int | float] = {}


@dataclass(slots=True)
class TrajectoryGroup:
    """The G trajectories of one prompt."""

    ordinal: int
    redraw: int
    prompt_ids: Int32
    """[P] stored once for the whole group."""
    trajectories: list[Trajectory]
    spans: list[Span] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of the group when its prompt is packed once."""
        return len(self.prompt_ids) + sum(len(t) for t in self.trajectories)

    @property
    def num_trained_tokens(self) -> int:
        return sum(int(t.loss_mask.sum()) for t in self.trajectories)

    @property
    def first_version(self) -> int:
        """The oldest version among the group's sampled tokens (a group without any counts as version 0)."""
        sampled = [t.policy_versions[t.policy_versions >= 0] for t in self.trajectories]
        return min((int(versions.min()) for versions in sampled if len(versions)), default=0)


class SamplingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How completions are sampled. The learner scores what is trained by the same temperature; only evaluations,
    which nothing is trained on, may be greedy or truncate the distribution."""

    temperature: float
    """0 is greedy."""
    max_completion_tokens: int
    stop: tuple[str, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    """0 is all tokens."""


class Plan(msgspec.Struct, frozen=True):
    """What every rank knows of one batch: the same bytes on every rank, a few kB.

    Groups are named by their position in `ordinals`, which is sorted.
    """

    index: int
    """Batch i is trained at version i and makes version i + 1."""
    ordinals: list[int]
    rewards: list[list[float | None]]
    """[group][trajectory]; None where the rollout has no reward."""
    num_trained_tokens: list[list[int]]
    """[group][trajectory], after the staleness mask."""
    minibatches: list[list[list[list[int]]]]
    """[mini-batch][rank][microbatch] -> positions of groups; every group is in exactly one of them. A mini-batch
    has equally many microbatches a rank; an empty one has weight 0."""
    num_epochs: int
    """Passes over the mini-batches, in the same order each time: minibatches x epochs optimizer steps."""
    components: dict[str, list[list[float | None]]] = {}
    """Reward label -> [group][trajectory], before weights; only for advantages that read them one by one."""
    num_greedy: int = 0
    """The last so many trajectories of every group are greedy rollouts: baselines, which do not train."""
    num_aged_out: list[int] = []
    """[group] trajectories whose every token is too old: they leave the denominators too. Empty: none."""

    @property
    def num_ranks(self) -> int:
        return len(self.minibatches[0])

    @property
    def total_trained_tokens(self) -> int:
        return sum(sum(group) for group in self.num_trained_tokens)

    def num_trained_tokens_of(self, minibatch: int) -> int:
        """Over all ranks: what the mini-batch's loss is divided by."""
        return sum(sum(self.num_trained_tokens[p]) for p in self.positions_in(minibatch))

    def positions_in(self, minibatch: int) -> list[int]:
        """The groups of a mini-batch, over all ranks."""
        return [p for of_rank in self.minibatches[minibatch] for microbatch in of_rank for p in microbatch]

    def positions_of(self, rank: int) -> list[int]:
        """The groups of a rank in the order of its shard: by mini-batch, then by microbatch."""
        return [p for minibatch in self.minibatches for microbatch in minibatch[rank] for p in microbatch]

    @property
    def digest(self) -> int:
        """63-bit hash of the plan: ranks compare it before their first collective of the batch."""
        raw = hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=8).digest()
        return int.from_bytes(raw, "little") >> 1


@dataclass(slots=True)
class Shard:
    """One rank's share of a batch."""

    plan: Plan
    rank: int
    groups: list[TrajectoryGroup]
    """In the order of `plan.positions_of(rank)`."""
