"""One rollout of SingleTurnEnv with an engine and a reward made of a few lines."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from asyncrl.envs.env import Answer, RewardOutcome, SingleTurnEnv
from asyncrl.models.tiny import EOS_ID, build_tokenizer
from asyncrl.types import Float32, Int32, Prompt, Status, Trajectory


@dataclass(frozen=True)
class Sampled:
    token_ids: Int32
    logprobs: Float32
    policy_versions: Int32
    finish_reason: str


def rollout(sampled: Sampled, outcome: RewardOutcome, seen: list[Any], tokenizer: Any = None) -> Trajectory:
    async def generate(context: Int32) -> Sampled:
        seen.append(context.tolist())
        return sampled

    async def score(answer: Answer) -> RewardOutcome:
        seen.append((answer.text, answer.token_ids.tolist()))
        return outcome

    prompt = Prompt(4, np.array([5, 6], np.int32), {"answer": "ba"})
    return asyncio.run(SingleTurnEnv(tokenizer or build_tokenizer()).rollout(prompt, generate, score))


def sampled(ids: list[int], finish_reason: str) -> Sampled:
    logprobs = np.linspace(-1, -0.1, len(ids), dtype=np.float32)
    return Sampled(np.array(ids, np.int32), logprobs, np.arange(len(ids), dtype=np.int32), finish_reason)


def test_a_scored_rollout_keeps_the_ids_and_trains_on_all_of_them_with_eos() -> None:
    # Catches: EOS stripped from the record, or masked; special tokens shown to the reward.
    seen: list[Any] = []
    completion = sampled([*build_tokenizer().encode("ba"), EOS_ID], "stop")
    outcome = RewardOutcome(1.0, Status.SCORED, components={"exact_match": 1.0})
    trajectory = rollout(completion, outcome, seen)
    assert seen == [[5, 6], ("ba", completion.token_ids.tolist())]
    assert trajectory.token_ids.tolist() == completion.token_ids.tolist()
    assert trajectory.rollout_logprobs.tolist() == completion.logprobs.tolist()
    assert trajectory.policy_versions.tolist() == [0, 1, 2]
    assert trajectory.loss_mask.tolist() == [1, 1, 1]
    assert trajectory.loss_mask.dtype == np.uint8
    assert (trajectory.reward, trajectory.status, trajectory.finish_reason) == (1.0, "scored", "stop")
    assert (trajectory.text, trajectory.detail) == ("ba", "")
    assert trajectory.reward_components == {"exact_match": 1.0}


@pytest.mark.parametrize("status", [Status.REWARD_FAILED, Status.REWARD_TIMEOUT])
def test_a_rollout_whose_reward_failed_has_no_reward(status: Status) -> None:
    # Catches: the reason dropped, or longer than the wire takes.
    trajectory = rollout(sampled([7], "length"), RewardOutcome(None, status, "why" + "y" * 5000), [])
    assert (trajectory.reward, trajectory.status, trajectory.finish_reason) == (None, status, "length")
    assert trajectory.detail == "wh" + "y" * 1998


def test_an_aborted_completion_is_never_scored() -> None:
    seen: list[Any] = []
    trajectory = rollout(sampled([], "abort"), RewardOutcome(1.0, Status.SCORED), seen)
    assert seen == [[5, 6]]
    assert (trajectory.reward, trajectory.status, len(trajectory)) == (None, Status.ABORTED, 0)
    assert trajectory.detail == "the engine ended the request without finishing it"


def test_ids_that_would_encode_differently_stay_as_sampled() -> None:
    # Catches: re-encoding the decoded text, which merges [2, 3] into [4].
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab={"a": 2, "b": 3, "ab": 4}, merges=[("a", "b")]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.encode("ab") == [4]
    trajectory = rollout(sampled([2, 3], "length"), RewardOutcome(0.0, Status.SCORED), [], tokenizer)
    assert (trajectory.text, trajectory.token_ids.tolist()) == ("ab", [2, 3])


@pytest.mark.parametrize(("ids", "reason"), [([5, 6, 1], "stop"), ([5, 9], "stop"), ([1, 1, 1], "length")])
def test_an_eos_that_is_the_pad_token_and_one_that_only_the_engine_knows_are_trained(
    ids: list[int], reason: str
) -> None:
    # Catches: a mask made from ids (ids != pad leaves the EOS out); finish_reason made from the tokenizer's one EOS
    # (a completion that ends in 9 would count as cut off).
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"</s>": 1, "a": 5, "b": 6, "<end>": 9}, unk_token="a"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="</s>", eos_token="</s>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
    trajectory = rollout(sampled(ids, reason), RewardOutcome(1.0, Status.SCORED), [], tokenizer)
    assert trajectory.token_ids.tolist() == ids
    assert trajectory.loss_mask.tolist() == [1] * len(ids)
    assert trajectory.finish_reason == reason


def test_the_engines_error_is_passed_on() -> None:
    async def generate(context: Int32) -> Sampled:
        raise RuntimeError("engine died")

    async def score(answer: Answer) -> RewardOutcome:
        raise AssertionError("scored")

    prompt = Prompt(0, np.array([5], np.int32), {})
    with pytest.raises(RuntimeError, match="engine died"):
        asyncio.run(SingleTurnEnv(build_tokenizer()).rollout(prompt, generate, score))
