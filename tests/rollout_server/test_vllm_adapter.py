"""The adapter's own decisions, against a stand-in for AsyncLLM: no engine is started."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrl.config import RolloutConfig
from asyncrl.errors import ConfigError, EngineError, EngineUnfit, WeightSyncError
from asyncrl.rollout_server.engine import GenerationRequest
from asyncrl.rollout_server.vllm_engine import VllmEngine
from asyncrl.rollout_server.vllm_process import core_lists
from asyncrl.rollout_server.vllm_request import completion, sampling_params
from asyncrl.types import SamplingSpec
from asyncrl.weight_sync.manifest import Manifest

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def request(temperature: float = 1.0, stop: tuple[str, ...] = ()) -> GenerationRequest:
    return GenerationRequest("r1", np.asarray([5, 6], np.int32), 1 << 62, SamplingSpec(temperature, 8, stop))


def make_engine(*, update_timeout_s: float = 5.0, **rollout: Any) -> VllmEngine:
    return VllmEngine(
        "model",
        RolloutConfig(**rollout),
        device="cpu",
        dtype="float32",
        max_model_len=64,
        update_timeout_s=update_timeout_s,
    )


def output(
    token_ids: list[int],
    *,
    logprobs: list[float] | None = None,
    spans: list[tuple[str, int, int]] | None = None,
    finish_reason: str | None = None,
    num_cached_tokens: int = 0,
) -> Any:
    """One of vLLM's RequestOutputs."""
    scored = SimpleNamespace(token_ids=token_ids, logprobs=logprobs or [-0.5] * len(token_ids))
    part = SimpleNamespace(
        token_ids=token_ids,
        logprobs=scored,
        finish_reason=finish_reason,
        weight_versions=None
        if spans is None
        else [SimpleNamespace(version=v, start=s, end=e) for v, s, e in spans],
    )
    return SimpleNamespace(
        outputs=[part], finished=finish_reason is not None, num_cached_tokens=num_cached_tokens
    )


VERSIONS = {"i-3": 3, "i-4": 4}


# Caught: spans used on the last output's tokens only; num_cached_tokens of the last output.
def test_a_completion_is_all_outputs_joined_with_a_version_for_each_token() -> None:
    found = completion(
        "r1",
        [
            output([7], logprobs=[-0.25], num_cached_tokens=32),
            output([8, 9], logprobs=[-1.5, 0.0], spans=[("i-3", 0, 2), ("i-4", 2, 3)], finish_reason="stop"),
        ],
        VERSIONS,
    )
    assert found.token_ids.tolist() == [7, 8, 9]
    assert found.logprobs.tolist() == [-0.25, -1.5, 0.0]
    assert found.policy_versions.tolist() == [3, 3, 4]
    assert (found.finish_reason, found.num_cached_tokens) == ("stop", 32)
    assert (found.token_ids.dtype, found.logprobs.dtype, found.policy_versions.dtype) == (
        np.int32,
        np.float32,
        np.int32,
    )


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([output([7], spans=[("default", 0, 1)], finish_reason="stop")], r"labels tokens 0 to 1 'default'"),
        ([output([7, 8], spans=[("i-3", 0, 1)], finish_reason="stop")], r"no weight version for some of 2"),
        ([output([7], spans=None, finish_reason="stop")], r"no weight version"),
        ([output([7], logprobs=[0.1], spans=[("i-3", 0, 1)], finish_reason="stop")], r"the log-prob 0\.1"),
        (
            [output([7], logprobs=[float("nan")], spans=[("i-3", 0, 1)], finish_reason="stop")],
            r"log-prob nan",
        ),
        ([output([7], spans=[("i-3", 0, 1)], finish_reason="error")], r"ended it with 'error'"),
        ([output([7])], r"without a final output"),
        ([], r"without a final output"),
    ],
)
def test_a_record_that_does_not_add_up_is_an_error(outputs: list[Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        completion("r1", outputs, VERSIONS)


def test_a_logprob_of_another_token_is_an_error() -> None:
    bad = output([7], spans=[("i-3", 0, 1)], finish_reason="stop")
    bad.outputs[0].logprobs.token_ids = [8]
    with pytest.raises(EngineError, match="scored 1 tokens and sampled 1"):
        completion("r1", [bad], VERSIONS)


# Caught: any default that truncates or reshapes the distribution.
def test_sampling_is_of_the_whole_distribution_with_the_requests_own_seed() -> None:
    params = sampling_params(request(0.7, stop=("x",)))
    assert (params.temperature, params.seed, params.max_tokens, params.n) == (0.7, 1 << 62, 8, 1)
    assert (params.top_p, params.top_k, params.min_p, params.repetition_penalty) == (1.0, 0, 0.0, 1.0)
    assert (params.presence_penalty, params.frequency_penalty, params.min_tokens) == (0.0, 0.0, 0)
    assert (params.logprobs, params.ignore_eos, params.stop, params.detokenize) == (0, False, ["x"], True)
    assert not sampling_params(request()).detokenize


def test_a_temperature_that_vllm_would_change_is_refused() -> None:
    with pytest.raises(EngineError, match=r"temperature 0\.001 is below vLLM's lowest, 0\.01"):
        sampling_params(request(0.001))
    assert sampling_params(request(0.0)).temperature == 0.0


@pytest.mark.parametrize("key", ["logprobs_mode", "generation_config", "weight_transfer_config", "dtype"])
def test_engine_args_that_asyncrl_relies_on_cannot_be_replaced(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.engine_args\.{key}: asyncrl sets it"):
        make_engine(engine_args={key: "x"})


# Caught: vLLM's own block counted, or a part of a block taken for a whole one.
@pytest.mark.parametrize(("num_blocks", "capacity"), [(1000, 128), (13, 4), (12, 3), (4, 1)])
def test_as_many_requests_run_as_the_kv_cache_holds_at_full_length(num_blocks: int, capacity: int) -> None:
    llm: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(
            cache_config=SimpleNamespace(block_size=30, num_gpu_blocks=num_blocks),
            scheduler_config=SimpleNamespace(max_num_seqs=128),
        )
    )
    assert make_engine()._capacity(llm) == capacity  # 64 tokens are three blocks of 30


def test_a_kv_cache_that_holds_no_request_is_an_error() -> None:
    cache = SimpleNamespace(block_size=30, num_gpu_blocks=3)
    llm: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(cache_config=cache, scheduler_config=SimpleNamespace(max_num_seqs=128))
    )
    with pytest.raises(EngineError, match=r"3 blocks of 30 tokens does not hold a request of 64 tokens"):
        make_engine()._capacity(llm)


def test_cores_are_dealt_out_to_the_workers() -> None:
    assert core_lists({1}, 1) == "1"
    assert core_lists({0, 1}, 1) == "0,1"
    assert core_lists({5, 2, 3, 4, 6}, 2) == "2,3|4,5"
    assert core_lists({0}, 2) == "nobind"


class FakeLLM:
    """AsyncLLM's control calls: each is logged, and does what `behaviour` says of it."""

    def __init__(self, behaviour: dict[str, Callable[[], Coroutine[Any, Any, Any]]]) -> None:
        self.calls: list[str] = []
        self.errored = False
        self.label = "default"
        self.errors: list[Exception] = []
        self.output_processor = SimpleNamespace(propagate_error=self.errors.append)
        self.output_handler = asyncio.ensure_future(asyncio.Event().wait())
        self.finish_generating = asyncio.Event()
        self._behaviour = behaviour

    async def _do(self, name: str) -> Any:
        self.calls.append(name)
        if name in self._behaviour:
            return await self._behaviour[name]()
        return None

    async def start_weight_update(self) -> None:
        await self._do("start")

    async def update_weights(self, update: Any) -> None:
        await self._do(update.update_info["step"])

    async def finish_weight_update(self, label: str | None = None) -> None:
        await self._do("finish")
        self.label = label or self.label

    async def get_weight_version(self) -> str:
        return await self._do("read") or self.label

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        await self._do("pause")

    async def resume_generation(self) -> None:
        await self._do("resume")

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any]:
        first = self.label
        yield output([7])
        await self.finish_generating.wait()
        spans = [(first, 0, 1), (self.label, 1, 2)]
        yield output([8], spans=spans, finish_reason="stop")

    def shutdown(self, timeout: float) -> None:
        self.calls.append("shutdown")
        self.output_handler.get_loop().call_soon_threadsafe(self.output_handler.cancel)


async def raise_broken() -> None:
    raise RuntimeError("boom")


async def hang() -> None:
    await asyncio.Event().wait()


async def another_label() -> str:
    return "i-99"


def with_fake(
    behaviour: dict[str, Callable[[], Coroutine[Any, Any, Any]]],
    scenario: Callable[[VllmEngine, FakeLLM], Coroutine[Any, Any, None]],
    update_timeout_s: float = 5.0,
) -> list[str]:
    async def run() -> list[str]:
        engine = make_engine(update_timeout_s=update_timeout_s)
        engine._llm = fake = FakeLLM(behaviour)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            await scenario(engine, fake)
        finally:
            await engine.close()
        return fake.calls

    return asyncio.run(run())


MANIFEST = Manifest("i", 4, 0, ())


def test_an_update_is_labelled_and_read_back_before_anything_resumes() -> None:
    async def scenario(engine: VllmEngine, fake: FakeLLM) -> None:
        with pytest.raises(EngineError, match="no version was applied"):
            await engine.resume()
        await engine.pause()
        await engine.apply("/nowhere", MANIFEST)
        assert (engine.version, engine.incarnation, fake.label) == (4, "i", "i-4")
        await engine.resume()

    assert with_fake({}, scenario) == [
        *("pause", "start", "check", "load", "finish", "read", "resume", "shutdown")
    ]


# Caught: a version committed although the load failed; an unfit engine that resumes or generates.
@pytest.mark.parametrize("step", ["load", "finish", "read"])
def test_a_failure_after_the_first_overwrite_makes_the_engine_unfit(step: str) -> None:
    async def scenario(engine: VllmEngine, fake: FakeLLM) -> None:
        await engine.pause()
        with pytest.raises(EngineUnfit, match=r"version 4 failed while it was loaded: .*restart the engine"):
            await engine.apply("/nowhere", MANIFEST)
        assert engine.version is None
        assert [type(error) for error in fake.errors] == [EngineUnfit]  # the frozen requests end
        for refused in (engine.resume(), engine.generate(request()), engine.pause()):
            with pytest.raises(EngineUnfit):
                await refused

    calls = with_fake({step: another_label if step == "read" else raise_broken}, scenario)
    assert "resume" not in calls


def test_a_refused_check_ends_the_update_and_changes_nothing(tmp_path: Any) -> None:
    path = tmp_path / "snapshot"
    path.touch()

    async def scenario(engine: VllmEngine, fake: FakeLLM) -> None:
        await engine.pause()
        with pytest.raises(
            WeightSyncError, match=r"version 4 was not applied and version None stays: boom"
        ) as info:
            await engine.apply(str(path), MANIFEST)
        assert not isinstance(info.value, EngineUnfit)
        await engine.pause()

    assert with_fake({"check": raise_broken}, scenario) == [
        *("pause", "start", "check", "finish", "pause", "shutdown")
    ]


def test_a_call_that_never_returns_runs_into_its_deadline() -> None:
    async def scenario(engine: VllmEngine, fake: FakeLLM) -> None:
        with pytest.raises(EngineError, match=r"vLLM did not pause within 0\.05 s; restart the engine"):
            await engine.pause()

    with_fake({"pause": hang}, scenario, update_timeout_s=0.05)


def test_a_call_ends_when_the_engine_core_dies() -> None:
    async def scenario(engine: VllmEngine, fake: FakeLLM) -> None:
        asyncio.get_running_loop().call_later(0.01, fake.output_handler.cancel)
        with pytest.raises(EngineError, match="engine core died before it could pause"):
            await engine.pause()

    with_fake({"pause": hang}, scenario)


def test_a_cancelled_update_leaves_the_engine_unfit() -> None:
    async def scenario(engine: VllmEngine, fake: FakeLLM) -> None:
        await engine.pause()
        applying = asyncio.ensure_future(engine.apply("/nowhere", MANIFEST))
        await asyncio.sleep(0.01)
        applying.cancel()
        await asyncio.gather(applying, return_exceptions=True)
        assert applying.cancelled()
        with pytest.raises(EngineUnfit, match="applying version 4 was cancelled"):
            await engine.resume()

    with_fake({"load": hang}, scenario)


# Caught: nothing forgotten; a version forgotten whose tokens a request in flight still holds.
def test_versions_are_forgotten_once_no_request_in_flight_can_bear_them() -> None:
    async def scenario(engine: VllmEngine, fake: FakeLLM) -> None:
        async def publish(version: int) -> None:
            await engine.pause()
            await engine.apply("/nowhere", Manifest("i", version, 0, ()))
            await engine.resume()

        engine._slots = asyncio.Semaphore(1)
        await publish(0)
        await publish(1)
        assert engine._versions == {"i-1": 1}
        generating = asyncio.ensure_future(engine.generate(request()))
        await asyncio.sleep(0.01)
        for version in (2, 3, 4):
            await publish(version)
        assert list(engine._versions.values()) == [1, 2, 3, 4]
        fake.finish_generating.set()
        assert (await generating).policy_versions.tolist() == [1, 4]
        await publish(5)
        assert engine._versions == {"i-5": 5}

    with_fake({}, scenario)


# Caught: a cancelled start that leaves its thread waiting for the engine core (asyncio.run then waits too).
@pytest.mark.parametrize("is_late", [False, True], ids=["core_runs", "core_appears_after_the_cancel"])
def test_a_cancelled_start_kills_the_engine_core_and_ends_its_thread(
    monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    begin, begun, cores = threading.Event(), threading.Event(), list[BaseProcess]()

    def make_llm(self: VllmEngine) -> Any:
        assert begin.wait(30)
        core = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), name="EngineCore")
        core.start()
        cores.append(core)
        begun.set()
        core.join(60)
        raise RuntimeError("the engine core ended")

    monkeypatch.setattr(VllmEngine, "_make_llm", make_llm)
    monkeypatch.setattr("asyncrl.rollout_server.vllm_engine.KILL_INTERVAL_S", 0.05)

    async def scenario() -> None:
        starting = asyncio.ensure_future(make_engine().start())
        if not is_late:
            begin.set()
            await asyncio.to_thread(begun.wait, 30)
        else:
            await asyncio.sleep(0.05)
            asyncio.get_running_loop().call_later(0.2, begin.set)
        starting.cancel()
        async with asyncio.timeout(30):
            await asyncio.wait({starting})
        assert starting.cancelled()

    try:
        asyncio.run(scenario())
        assert [core.exitcode for core in cores] == [-signal.SIGKILL]
    finally:
        for core in cores:
            core.kill()
            core.join(10)


def test_an_engine_that_was_not_started_or_is_closed_says_so() -> None:
    async def scenario() -> None:
        engine = make_engine()
        with pytest.raises(EngineError, match="is not running"):
            await engine.generate(request())
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match=r"closed|not running"):
            await engine.generate(request())

    asyncio.run(scenario())
