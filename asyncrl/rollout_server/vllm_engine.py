"""vLLM behind the Engine seam: one AsyncLLM whose weights are replaced while its requests run.

The rollout server's loop is the only caller. vLLM is imported, and its environment set, by `start`; its
engine core and workers are processes of their own, which `close` ends.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from asyncrl.config import RolloutConfig
from asyncrl.errors import AsyncRLError, ConfigError, EngineError, EngineUnfit, SnapshotGone, WeightSyncError
from asyncrl.rollout_server.engine import Completion, EngineStatistics, GenerationRequest
from asyncrl.rollout_server.gate import Gate, Submission
from asyncrl.rollout_server.vllm_process import (
    Counters,
    end_processes,
    engine_args,
    engine_core_ids,
    set_environment,
    with_descendants,
)
from asyncrl.rollout_server.vllm_request import completion, sampling_params
from asyncrl.weight_sync.manifest import Manifest
from asyncrl.weight_sync.vllm_plugin import BACKEND

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

KILL_INTERVAL_S = 0.5
"""How often engine cores of a start that was given up are looked for, and killed."""

T = TypeVar("T")
E = TypeVar("E", bound=AsyncRLError)


class VllmEngine:
    """Implements Engine. start -> (pause ->) apply version 0 -> resume -> generate ... -> close.

    The gate is closed until the first `resume`. All calls belong to one event loop.
    """

    def __init__(
        self,
        model_path: str,
        rollout: RolloutConfig,
        *,
        device: str,
        dtype: str,
        max_model_len: int,
        start_timeout_s: float = 300.0,
        update_timeout_s: float = 300.0,
        shutdown_timeout_s: float = 10.0,
    ) -> None:
        """`device`: cpu or cuda. `max_model_len`: prompt and completion together, in tokens.

        `update_timeout_s` bounds each of pause, apply and resume. The incarnation comes with the manifests.
        Raises ConfigError when rollout.engine_args would replace what asyncrl relies on.
        """
        self._model_path = model_path
        self._rollout = rollout
        self._device = device
        self._max_model_len = max_model_len
        self._start_timeout_s = start_timeout_s
        self._update_timeout_s = update_timeout_s
        self._shutdown_timeout_s = shutdown_timeout_s
        self._engine_args = engine_args(model_path, rollout, device, dtype, max_model_len)
        self._counters = Counters()
        self._gate = Gate()
        self._slots = asyncio.Semaphore(0)
        self._max_concurrent_requests = 0
        self._llm: AsyncLLM | None = None
        self._processes: list[psutil.Process] = []
        self._start_given_up = False
        self._versions: dict[str, int] = {}
        """Of each label that a token of a request in flight may bear, in the order of their commits."""
        self._labels_in_flight: list[str] = []
        """What was committed when each of the requests in flight was submitted."""
        self._committed: Manifest | None = None

    async def start(self) -> None:
        """Starts vLLM's processes. Raises EngineError when they are not up after `start_timeout_s`."""
        set_environment(self._device, self._rollout.tensor_parallel_size)
        others = engine_core_ids()
        try:
            async with asyncio.timeout(self._start_timeout_s):
                self._llm = await self._make_llm_in_thread(others)
        except TimeoutError as error:
            raise EngineError(
                f"vLLM was not up after {self._start_timeout_s} s (timeouts.engine_start_s); see its log"
            ) from error
        except AsyncRLError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM did not start with {self._model_path}: {error}; see its log") from error
        self._processes = with_descendants(engine_core_ids() - others)
        self._llm._run_output_handler()
        self._max_concurrent_requests = self._capacity(self._llm)
        self._slots = asyncio.Semaphore(self._max_concurrent_requests)
        await self._init_weight_transfer(self._llm)

    async def _make_llm_in_thread(self, others: set[int]) -> AsyncLLM:
        """Cancelled, or past its deadline, it leaves no engine core but `others` and no thread behind.

        A thread cannot be cancelled. But it ends soon when the engine core that it waits for is killed, or
        before it begins one.
        """
        making = asyncio.create_task(asyncio.to_thread(self._make_llm))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            self._start_given_up = True
            while not making.done():  # an engine core may appear only now
                end_processes(with_descendants(engine_core_ids() - others), timeout_s=0)
                await asyncio.wait({making}, timeout=KILL_INTERVAL_S)
            if making.exception() is None:
                await asyncio.to_thread(making.result().shutdown, 0)
            raise

    def _make_llm(self) -> AsyncLLM:
        from vllm import __version__
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.outputs import CompletionOutput
        from vllm.v1.engine.async_llm import AsyncLLM

        if "weight_versions" not in {field.name for field in fields(CompletionOutput)}:
            raise EngineError(
                f"vLLM {__version__} does not report the weight version of each token; install 0.28 or newer"
            )
        weight_transfer = WeightTransferConfig(backend=BACKEND)
        try:
            args = AsyncEngineArgs(**self._engine_args, weight_transfer_config=weight_transfer)
        except TypeError as error:
            raise ConfigError(f"rollout.engine_args: {error}; see vLLM's AsyncEngineArgs") from error
        if self._start_given_up:
            raise EngineError("the start of vLLM was given up")
        return AsyncLLM.from_engine_args(args, stat_loggers=[lambda config, index: self._counters])  # pyright: ignore[reportArgumentType, reportReturnType]

    def _capacity(self, llm: AsyncLLM) -> int:
        """Requests of max_model_len that the KV cache holds at once (one block is vLLM's own)."""
        cache = llm.vllm_config.cache_config
        blocks_each = -(-self._max_model_len // cache.block_size)
        num_held = ((cache.num_gpu_blocks or 0) - 1) // blocks_each
        num_requests = min(llm.vllm_config.scheduler_config.max_num_seqs, num_held)
        if num_requests < 1:
            key = "kv_cache_gib" if self._device == "cpu" else "gpu_memory_utilization"
            raise EngineError(
                f"the KV cache of {cache.num_gpu_blocks} blocks of {cache.block_size} tokens does not hold "
                f"a request of {self._max_model_len} tokens; raise rollout.{key}"
            )
        return num_requests

    async def _init_weight_transfer(self, llm: AsyncLLM) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._call(
            llm, llm.init_weight_transfer_engine(WeightTransferInitRequest({})), "prepare weight updates"
        )

    @property
    def version(self) -> int | None:
        """The committed policy version."""
        return None if self._committed is None else self._committed.version

    @property
    def incarnation(self) -> str | None:
        """The incarnation of the committed version."""
        return None if self._committed is None else self._committed.incarnation

    @property
    def max_concurrent_requests(self) -> int:
        """Bounded by max_num_seqs and by what the KV cache holds: vLLM never has to make one wait."""
        return self._max_concurrent_requests

    def statistics(self) -> EngineStatistics:
        return self._counters.snapshot()

    async def generate(self, request: GenerationRequest) -> Completion:
        """Samples one completion. Cancelling it aborts the request.

        Raises EngineError when the request cannot be served as it is, or the engine died, is closed or unfit
        (then as the EngineUnfit that `apply` raised).
        """
        length = len(request.prompt_ids) + request.sampling.max_completion_tokens
        if length > self._max_model_len:
            raise EngineError(
                f"request {request.request_id}: prompt and completion may reach {length} tokens and "
                f"max_model_len is {self._max_model_len}; shorten one"
            )
        params = sampling_params(request)
        llm = self._started()
        async with self._slots, self._gate.submission(request.request_id) as submission:
            # Reading the version, salting and submitting are one step: no update before `scheduled`.
            assert self._committed is not None
            label = _label(self._committed)
            prompt: Any = {"prompt_token_ids": request.prompt_ids.tolist(), "cache_salt": label}
            self._labels_in_flight.append(label)
            try:
                outputs = await self._outputs(llm.generate(prompt, params, request.request_id), submission)
                return completion(request.request_id, outputs, self._versions)
            except AsyncRLError:
                raise
            except Exception as error:
                raise self._failed(error, f"generate {request.request_id}") from error
            finally:
                self._labels_in_flight.remove(label)

    async def _outputs(
        self, stream: AsyncGenerator[RequestOutput], submission: Submission
    ) -> list[RequestOutput]:
        """All outputs of one request; the first says that it is scheduled."""
        outputs: list[RequestOutput] = []
        async with aclosing(stream):
            async for output in stream:
                submission.scheduled()
                outputs.append(output)
        return outputs

    async def pause(self) -> None:
        """Closes the gate, waits until every submitted request runs, then freezes them with their KV cache.

        Raises EngineError; the gate is open again when only the wait ran out of time.
        """
        llm = self._started()
        await self._gate.close(self._update_timeout_s)
        await self._call(llm, llm.pause_generation(mode="keep", clear_cache=False), "pause")

    async def apply(self, path: str, manifest: Manifest) -> None:
        """Loads the verified snapshot at `path` and commits its version.

        Raises SnapshotGone or WeightSyncError when nothing was changed (resume, and the old version goes on);
        EngineUnfit when it failed after that: the engine then refuses everything but `close`.
        """
        if self._gate.is_open:
            raise WeightSyncError(
                f"version {manifest.version} cannot be applied while requests run; pause first"
            )
        llm = self._started()
        info = {"path": path, "manifest": manifest.encode().decode()}
        try:
            await self._check(llm, info, manifest)
            await self._load(llm, info, manifest)
        except asyncio.CancelledError:
            self._break(EngineUnfit(f"applying version {manifest.version} was cancelled; restart the engine"))
            raise

    async def _check(self, llm: AsyncLLM, info: dict[str, str], manifest: Manifest) -> None:
        """The part of an update that changes nothing."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        try:
            await self._call(llm, llm.start_weight_update(), "start a weight update")
            await self._call(
                llm, llm.update_weights(WeightTransferUpdateRequest({"step": "check", **info})), "check"
            )
        except AsyncRLError:
            raise
        except Exception as error:
            with suppress(Exception):  # only workers that passed the check still have an update to end
                await self._call(llm, llm.finish_weight_update(), "end a refused weight update")
            if not os.path.exists(info["path"]):  # noqa: ASYNC240  (one stat, of a local file)
                raise SnapshotGone(
                    f"snapshot {info['path']} of version {manifest.version} is gone"
                ) from error
            raise WeightSyncError(
                f"version {manifest.version} was not applied and version {self.version} stays: {error}"
            ) from error

    async def _load(self, llm: AsyncLLM, info: dict[str, str], manifest: Manifest) -> None:
        """The part of an update that cannot be undone."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        label = _label(manifest)
        try:
            await self._call(
                llm, llm.update_weights(WeightTransferUpdateRequest({"step": "load", **info})), "load"
            )
            await self._call(llm, llm.finish_weight_update(label), "finish the weight update")
            found = await self._call(llm, llm.get_weight_version(), "read its weight version")
            if found != label:
                raise EngineError(f"vLLM reads its weight version back as {found!r}, not {label!r}")
        except Exception as error:
            raise self._break(
                EngineUnfit(
                    f"version {manifest.version} failed while it was loaded: {error}; restart the engine"
                )
            ) from error
        self._committed = manifest
        self._versions[label] = manifest.version
        for old in list(self._versions):
            if old == label or old in self._labels_in_flight:
                break  # tokens of the requests in flight may bear this label and all after it
            del self._versions[old]

    async def resume(self) -> None:
        """Frozen requests go on, and the gate opens. Raises EngineError before the first `apply`."""
        llm = self._started()
        if self._committed is None:
            raise EngineError("no version was applied yet: the engine has nothing to serve")
        await self._call(llm, llm.resume_generation(), "resume")
        self._gate.open()

    async def close(self) -> None:
        """Ends the engine and its processes; requests that still run fail with EngineError. Idempotent."""
        self._gate.fail(EngineError("the engine is closed"))
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.output_processor.propagate_error(EngineError("the engine is closed"))
            if (handler := llm.output_handler) is not None:
                handler.cancel()  # or it takes the end of the engine core for its death, and logs an error
                await asyncio.wait({handler})
            await asyncio.to_thread(llm.shutdown, self._shutdown_timeout_s)
            del llm, handler
            gc.collect()  # or its __del__ runs when the interpreter has lost its modules, and prints an error
        processes, self._processes = self._processes, []
        await asyncio.to_thread(end_processes, processes, timeout_s=2.0)

    def _started(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineError("the engine is not running; start it first")
        if self._gate.failure is not None:
            raise self._gate.failure
        return self._llm

    async def _call(self, llm: AsyncLLM, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """Awaits one of vLLM's control calls, which by themselves never return when the engine core dies.

        Raises EngineError, and breaks the engine, when it died or did not answer in time; else what the call
        raised.
        """
        assert llm.output_handler is not None
        call = asyncio.ensure_future(coroutine)
        try:
            async with asyncio.timeout(self._update_timeout_s):
                await asyncio.wait({call, llm.output_handler}, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            raise self._break(
                EngineError(f"vLLM's engine core died before it could {what}; restart the engine")
            )
        except TimeoutError as error:
            raise self._break(
                EngineError(f"vLLM did not {what} within {self._update_timeout_s} s; restart the engine")
            ) from error
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    def _failed(self, error: Exception, what: str) -> Exception:
        """vLLM's error in our terms; the engine is broken when it is dead."""
        if self._llm is not None and self._llm.errored:
            self._break(EngineError(f"vLLM's engine core is dead; restart the engine ({error!r})"))
        return self._gate.failure or EngineError(f"vLLM could not {what}: {error.__cause__ or error!r}")

    def _break(self, failure: E) -> E:
        """Ends the requests that run; every call but `close` raises `failure` from now on.

        Or the failure that broke the engine before: the first one stays.
        """
        self._gate.fail(failure)
        if self._llm is not None:
            self._llm.output_processor.propagate_error(failure)
        return failure


def _label(manifest: Manifest) -> str:
    """Weight label and prefix-cache salt of a version: unique over incarnations."""
    return f"{manifest.incarnation}-{manifest.version}"
