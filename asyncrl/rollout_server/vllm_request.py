"""A request in vLLM's terms, and its outputs back in ours. Pure functions, used by `VllmEngine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrl.errors import EngineError
from asyncrl.rollout_server.engine import Completion, GenerationRequest
from asyncrl.types import Int32

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput

LOWEST_TEMPERATURE = 0.01
"""vLLM raises smaller ones to this without an error, except 0, which is greedy."""


def sampling_params(request: GenerationRequest) -> SamplingParams:
    """Every field that shapes the distribution, explicit: no default of vLLM or of the model gets in.

    The first token comes as soon as it is there and the rest when the request has finished (the engine's
    stream interval is longer than any completion).
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise EngineError(
            f"request {request.request_id}: temperature {sampling.temperature} is below vLLM's lowest, "
            f"{LOWEST_TEMPERATURE}; use that, or 0 for greedy"
        )
    return SamplingParams(
        n=1,
        seed=request.seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        max_tokens=sampling.max_completion_tokens,
        min_tokens=0,
        stop=list(sampling.stop),
        stop_token_ids=[],
        ignore_eos=False,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        include_stop_str_in_output=True,
        logit_bias=None,
        allowed_token_ids=None,
        bad_words=None,
        output_kind=RequestOutputKind.DELTA,
    )


def completion(request_id: str, outputs: Sequence[RequestOutput], versions: Mapping[str, int]) -> Completion:
    """Joins a finished request's outputs. `versions`: the policy version of each label that it may bear.

    Raises EngineError when vLLM did not finish it, or its record does not add up.
    """
    if not outputs or not outputs[-1].finished:
        raise EngineError(f"request {request_id}: vLLM ended it without a final output")
    parts = [output.outputs[0] for output in outputs]
    token_ids = np.asarray([token for part in parts for token in part.token_ids], dtype=np.int32)
    if parts[-1].finish_reason not in ("stop", "length", "abort"):
        raise EngineError(f"request {request_id}: vLLM ended it with {parts[-1].finish_reason!r}")
    return Completion(
        token_ids=token_ids,
        logprobs=_logprobs(request_id, parts, token_ids),
        policy_versions=_policy_versions(
            request_id, parts[-1].weight_versions or [], len(token_ids), versions
        ),
        finish_reason=parts[-1].finish_reason,
        num_cached_tokens=outputs[0].num_cached_tokens or 0,
    )


def _logprobs(request_id: str, parts: Sequence[Any], token_ids: Int32) -> np.ndarray:
    """[T] float32, one a sampled token."""
    scored_ids = [token for part in parts for token in part.logprobs.token_ids]
    logprobs = np.asarray([value for part in parts for value in part.logprobs.logprobs], dtype=np.float32)
    if not np.array_equal(scored_ids, token_ids):
        raise EngineError(
            f"request {request_id}: vLLM scored {len(scored_ids)} tokens and sampled {len(token_ids)}"
        )
    if not (np.isfinite(logprobs) & (logprobs <= 0)).all():
        worst = logprobs[~(np.isfinite(logprobs) & (logprobs <= 0))][0]
        raise EngineError(f"request {request_id}: vLLM gave the log-prob {worst}; its weights may be broken")
    return logprobs


def _policy_versions(
    request_id: str, spans: Sequence[Any], num_tokens: int, versions: Mapping[str, int]
) -> Int32:
    """[T] from vLLM's spans, which must cover every token."""
    policy_versions = np.full(num_tokens, -1, dtype=np.int32)
    for span in spans:
        if span.version not in versions:
            raise EngineError(
                f"request {request_id}: vLLM labels tokens {span.start} to {span.end} {span.version!r}, a "
                "version that was never committed"
            )
        policy_versions[span.start : span.end] = versions[span.version]
    if (policy_versions < 0).any():
        raise EngineError(
            f"request {request_id}: vLLM named no weight version for some of {num_tokens} tokens"
        )
    return policy_versions
