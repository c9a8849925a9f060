"""Which tokens are too old and how much may be started, in the words of coordinator/staleness.py.

A batch trained at step i makes version i + 1, so a peer's "current step" is the index of the batch.
"""

from __future__ import annotations

from asyncrl.coordinator.staleness import Pacing, num_leases_allowed, token_is_trained
from tests.algorithms.goldens import Golden


def replay(case: Golden) -> None:
    {
        "result_is_stale": _open_instruct,
        "_AsyncStalenessManager": _skyrl,
        "ReplayBufferAsync._stale_terminal_keys": _verl,
    }[case.function.rpartition("::")[2]](case)


def _open_instruct(case: Golden) -> None:
    limit = case.params["max_result_age_steps"]
    for (version, step), stale in zip(
        case.inputs["model_step_training_step"], case.outputs["stale"], strict=True
    ):
        if version is None or step is None:
            assert not stale  # every token and batch of ours has a version
        else:
            assert _is_too_old(step, version, limit) == stale


def _verl(case: Golden) -> None:
    """Its span counts both ends: threshold 1 keeps what was submitted in the current step."""
    limit = case.params["max_off_policy_threshold"] - 1
    submitted = case.inputs["prompt_submit_step"]
    step = case.inputs["current_step"]
    assert [p for p, version in submitted.items() if _is_too_old(step, version, limit)] == case.outputs[
        "dropped"
    ]


def _is_too_old(step: int, version: int, limit: int | None) -> bool:
    return not token_is_trained(
        batch_index=step,
        token_version=version,
        max_staleness=limit or 0,
        over_age="keep" if limit is None else "mask",
    )


def _skyrl(case: Golden) -> None:
    """Its steps start at 1, and what it accepted includes what it has trained."""
    params = case.params
    pacing = Pacing(params["mini_batch_size"], params["max_staleness_steps"], max_versions=1000)
    allowed = [
        num_leases_allowed(
            pacing,
            outstanding=state["accepted"] + state["running"],
            num_batches_formed=0,
            server_version=state["step"] - 1,
        )
        for state in case.inputs["states"]
    ]
    assert max(allowed) < params["max_concurrent_generation_groups"]  # a limit of the servers' own here
    assert allowed == case.outputs["capacity"]
