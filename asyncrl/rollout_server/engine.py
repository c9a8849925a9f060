"""The Engine seam: what a rollout server needs of an inference engine.

One request is one completion. The engine owns the gate between sampling and weight updates: reading the
committed version, salting the prefix cache and submitting are one step that no update can split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from asyncrl.types import Float32, Int32, SamplingSpec
from asyncrl.weight_sync.manifest import Manifest


@dataclass(slots=True, frozen=True)
class GenerationRequest:
    """One completion to sample. Token ids in, token ids out."""

    request_id: str
    prompt_ids: Int32
    """[P]"""
    seed: int
    """63 bits; the same request on the same version samples the same tokens."""
    sampling: SamplingSpec


@dataclass(slots=True, frozen=True)
class Completion:
    """What was sampled."""

    token_ids: Int32
    """[T]"""
    logprobs: Float32
    """[T] under the distribution that was sampled from (after temperature)."""
    policy_versions: Int32
    """[T] the version whose weights sampled each token."""
    finish_reason: str
    """stop | length | abort"""
    num_cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""


@dataclass(slots=True, frozen=True)
class EngineStatistics:
    """A snapshot of the engine's counters."""

    num_steps: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_sampled_tokens: int


class Engine(Protocol):
    """start -> apply version 0 (cold) -> generate, with pause / apply / resume in between -> close."""

    async def start(self) -> None:
        """Loads the engine. Nothing may be generated before the first `apply`."""
        ...

    @property
    def version(self) -> int | None:
        """The committed version; None before the first `apply`."""
        ...

    @property
    def incarnation(self) -> str | None:
        """The incarnation of the committed version: versions of two incarnations are never compared."""
        ...

    @property
    def max_concurrent_requests(self) -> int:
        """Requests that run at once; more wait in `generate`, outside the engine."""
        ...

    def statistics(self) -> EngineStatistics: ...

    async def generate(self, request: GenerationRequest) -> Completion:
        """Samples one completion. Cancelling it aborts the request. Raises EngineError."""
        ...

    async def pause(self) -> None:
        """Closes the gate, waits until every submitted request runs, then freezes them (KV kept)."""
        ...

    async def apply(self, path: str, manifest: Manifest) -> None:
        """Loads the snapshot at `path` and commits its version. Only while paused. Raises WeightSyncError."""
        ...

    async def resume(self) -> None:
        """Opens the gate; frozen requests go on."""
        ...

    async def close(self) -> None:
        """Ends the engine and its processes. Idempotent."""
        ...
