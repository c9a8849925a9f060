"""The Env seam: one rollout, from a prompt to a trajectory. Rollout servers run it, many at once.

An environment is given two callables and knows neither the engine nor the rewards: `generate` samples one
completion after a context of token ids (request id, seed and sampling are the caller's), `score` gives its
text a reward.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from asyncrl.types import MAX_DETAIL_CHARACTERS, Float32, Int32, Prompt, Status, Trajectory


class SampledCompletion(Protocol):
    """What an environment reads of an engine's completion; arrays are [T]."""

    @property
    def token_ids(self) -> Int32: ...
    @property
    def logprobs(self) -> Float32: ...
    @property
    def policy_versions(self) -> Int32: ...
    @property
    def finish_reason(self) -> str: ...


class Answer(NamedTuple):
    """A completion as rewards see it."""

    text: str
    """Without special tokens."""
    token_ids: Int32
    """[T] as sampled."""


class RewardOutcome(NamedTuple):
    """What came of scoring one answer. `reward` is a finite number only when status is SCORED."""

    reward: float | None
    """None also where no reward applied (status SCORED): GroupScoring makes that a failure in the end."""
    status: Status
    detail: str = ""
    """Why there is no reward, on one line."""
    components: Mapping[str, float] = MappingProxyType({})
    """What each reward gave, by label, before weights; and `label/key`: the other numbers that it returned."""


class Rewards(Protocol):
    """What scores the rollouts of a group (weighted_rewards.py). Failures are outcomes, never exceptions."""

    @property
    def needs_group(self) -> bool:
        """Whether some reward is given all answers of a group at once."""
        ...

    @property
    def num_finished(self) -> int:
        """Calls that have come back so far, whatever became of them: it grows while rewards get on."""
        ...

    async def score_one(self, answer: Answer, row: dict[str, Any]) -> RewardOutcome:
        """Of the rewards that take one answer at a time."""
        ...

    async def score_group(self, answers: Sequence[Answer], row: dict[str, Any]) -> list[RewardOutcome]:
        """Of the rewards that take a group's answers; one outcome an answer."""
        ...


Generate = Callable[[Int32], Awaitable[SampledCompletion]]
"""Context token ids [P] -> the completion sampled after them."""

Score = Callable[[Answer], Awaitable[RewardOutcome]]
"""The rollout's answer -> its outcome. Called at most once a rollout."""


class Decoder(Protocol):
    """The part of a tokenizer that an environment needs."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = ..., **kwargs: Any) -> str | list[str]: ...


class Env(Protocol):
    """Runs rollouts. One object serves many at once, so it keeps no state of any single one."""

    async def rollout(self, prompt: Prompt, generate: Generate, score: Score) -> Trajectory:
        """Generates and scores once. What `generate` raises is passed on; a failed reward is a status."""
        ...


class SingleTurnEnv:
    """One prompt, one completion, one reward."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer

    async def rollout(self, prompt: Prompt, generate: Generate, score: Score) -> Trajectory:
        """Every sampled token trains, the EOS included. An aborted completion is never scored."""
        completion = await generate(prompt.token_ids)
        # Text is for the reward and for display; the ids are the record and are never made from it.
        text = self._tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        assert isinstance(text, str)
        if completion.finish_reason == "abort":
            outcome = RewardOutcome(None, Status.ABORTED, "the engine ended the request without finishing it")
        else:
            outcome = await score(Answer(text, completion.token_ids))
        return Trajectory(
            token_ids=completion.token_ids,
            loss_mask=np.ones(len(completion.token_ids), np.uint8),
            rollout_logprobs=completion.logprobs,
            policy_versions=completion.policy_versions,
            reward=outcome.reward,
            status=outcome.status,
            finish_reason=completion.finish_reason,
            text=text,
            detail=outcome.detail[:MAX_DETAIL_CHARACTERS],
            reward_components=dict(outcome.components),
        )
