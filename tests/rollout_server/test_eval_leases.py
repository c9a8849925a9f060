"""A rollout server's part in evaluations: its loop with a stand-in engine, and the request that reaches vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scripted_run import DEADLINE_S, MAX_MESSAGE_BYTES, connection, limits_of, listener

from asyncrl.config import load_config
from asyncrl.envs.env import Answer, RewardOutcome, SingleTurnEnv
from asyncrl.rollout_server.engine import Completion, EngineStatistics, GenerationRequest
from asyncrl.rollout_server.server import RolloutServer
from asyncrl.rollout_server.vllm_request import sampling_params
from asyncrl.stream.codec import Received, decode
from asyncrl.stream.envelope import Envelope
from asyncrl.stream.messages import (
    AnyMessage,
    EvalFinished,
    EvalLease,
    GroupFinished,
    Heartbeat,
    Lease,
    ServerHello,
    ServerWelcome,
    Stop,
)
from asyncrl.types import SamplingSpec, Status
from asyncrl.weight_sync.manifest import Manifest

CONFIG = load_config(
    None,
    [
        "rollout.group_size=2",
        "rollout.max_groups_in_flight=1",
        "timeouts.heartbeat_s=0.6",
        "data.eval=rev4",
        "eval.every=1",
        "eval.temperature=0.5",
        "eval.num_samples=3",
        "eval.max_completion_tokens=16",
    ],
)
EVAL_SAMPLING = SamplingSpec(0.5, 16, ("\n",), 0.9, 20)


class StandIn:
    """An engine that answers at once, with as many tokens as a request may have; it remembers the requests."""

    version, incarnation, max_concurrent_requests = 3, "i", 8

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    async def start(self) -> None: ...
    async def pause(self) -> None: ...
    async def apply(self, path: str, manifest: Manifest) -> None: ...
    async def resume(self) -> None: ...
    async def close(self) -> None: ...
    def statistics(self) -> EngineStatistics:
        return EngineStatistics(1, 0, 0, 0.0, 0)

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        n = request.sampling.max_completion_tokens
        ones = np.ones(n, np.int32)
        return Completion(ones, np.full(n, -0.5, np.float32), 3 * ones, "length", 0)


class Half:
    """Rewards: every answer gets a half."""

    needs_group = False
    num_finished = 0

    async def score_one(self, answer: Answer, row: dict[str, Any]) -> RewardOutcome:
        return RewardOutcome(0.5, Status.SCORED)

    async def score_group(self, answers: Sequence[Answer], row: dict[str, Any]) -> list[RewardOutcome]:
        raise AssertionError("no reward needs the group")


class Text:
    def decode(self, token_ids: Any, skip_special_tokens: bool = True, **kwargs: Any) -> str:
        return f"{len(token_ids)} tokens"


class NoTransport:
    async def stage(self, path: str, manifest: Manifest) -> str:
        return path


async def exchange(engine: StandIn, leases: Sequence[AnyMessage], num_answers: int) -> list[Received]:
    """What the server sends after its Hello until it has answered; the coordinator is this function."""
    answers: list[Received] = []
    ours = Envelope("coordinator", max_message_bytes=MAX_MESSAGE_BYTES, run="r", incarnation="i")
    limits = limits_of(CONFIG, newest_version=3)
    async with listener() as coordinator:
        connecting = connection(coordinator.address, "server", limits_of(CONFIG))
        async with asyncio.timeout(DEADLINE_S), connecting as connected:
            server = RolloutServer(
                CONFIG, engine, connected, env=SingleTurnEnv(Text()), rewards=Half(), transport=NoTransport()
            )
            running = asyncio.ensure_future(server.run())
            try:
                peer, frames = await coordinator.recv()
                assert isinstance(decode(frames, limits).body, ServerHello)
                await coordinator.send(peer, ours.seal(ServerWelcome()))
                for lease in leases:
                    await coordinator.send(peer, ours.seal(lease, (), np.array([4, 5], np.int32)))
                while sum(isinstance(a.body, EvalFinished | GroupFinished) for a in answers) < num_answers:
                    answers.append(decode((await coordinator.recv())[1], limits))
                answers.append(decode((await coordinator.recv())[1], limits))
                await coordinator.send(peer, ours.seal(Stop("")))
                await running
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
    return answers


def test_an_eval_lease_is_sampled_as_it_says_and_answered_beside_training_leases():
    # Mutations: the training's sampling; request ids of training (both leases are number 7); no heartbeat entry.
    engine = StandIn()
    leases = [EvalLease(3, 7, [1, 2, 3], EVAL_SAMPLING, {"answer": "x"}), Lease(7, 0, [4, 5], {})]
    answers = asyncio.run(exchange(engine, leases, num_answers=2))
    by_id = {request.request_id: request for request in engine.requests}
    assert set(by_id) == {"eval.3.7.0", "eval.3.7.1", "eval.3.7.2", "7.0.0", "7.0.1"}
    assert {r.sampling for name, r in by_id.items() if name.startswith("eval")} == {EVAL_SAMPLING}
    assert {r.sampling for name, r in by_id.items() if not name.startswith("eval")} == {SamplingSpec(1.0, 8)}
    assert [by_id[f"eval.3.7.{sample}"].seed for sample in range(3)] == [1, 2, 3]
    finished = next(a for a in answers if isinstance(a.body, EvalFinished))
    assert isinstance(finished.body, EvalFinished)
    assert (finished.body.version, finished.body.group.ordinal, finished.body.group.redraw) == (3, 7, 0)
    assert [(t.reward, t.text, len(t)) for t in finished.groups[0].trajectories] == [
        (0.5, "16 tokens", 16)
    ] * 3


def test_heartbeats_list_the_evaluation_leases_that_are_worked_on():
    class Slow(StandIn):
        async def generate(self, request: GenerationRequest) -> Completion:
            await asyncio.sleep(0.5)  # over two heartbeats
            return await super().generate(request)

    lease = EvalLease(3, 7, [1, 2, 3], EVAL_SAMPLING, {})
    answers = asyncio.run(exchange(Slow(), [lease], num_answers=1))
    beats = [a.body for a in answers if isinstance(a.body, Heartbeat)]
    assert any(beat.eval_leases == [(3, 7)] and beat.state != "idle" for beat in beats)
    assert beats[-1].eval_leases == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_vllm_gets_every_field_of_the_lease_explicitly():
    # Mutations: top_p and top_k dropped on the way; greedy raised to 0.01.
    def params(sampling: SamplingSpec) -> Any:
        return sampling_params(GenerationRequest("r", np.array([5], np.int32), 1 << 62, sampling))

    sampled = params(SamplingSpec(0.6, 16, (), 0.9, 20))
    assert (sampled.temperature, sampled.top_p, sampled.top_k, sampled.max_tokens) == (0.6, 0.9, 20, 16)
    greedy = params(SamplingSpec(0.0, 16))
    assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0.0, 1.0, 0)
    whole = params(SamplingSpec(1.0, 16))
    assert (whole.top_p, whole.top_k, whole.min_p) == (1.0, 0, 0.0)


def test_the_engine_holds_the_longer_of_training_and_evaluation():
    # Mutation: max_model_len of training: an evaluation's request would be refused.
    from asyncrl.launch.preflight import max_sequence_tokens

    assert max_sequence_tokens(CONFIG) == CONFIG.data.max_prompt_tokens + 16
    assert CONFIG.rollout.max_completion_tokens == 8
