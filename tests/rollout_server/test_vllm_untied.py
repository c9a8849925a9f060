"""A real engine whose model has an output head of its own: served right, and dead when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncrl.errors import EngineError

if TYPE_CHECKING:
    from tests.conftest import ServedModel

pytestmark = pytest.mark.engine

PROMPT = list(range(20, 50))


# Caught: lm_head.weight left out of what is published.
def test_every_log_prob_after_an_update_is_of_the_new_weights(untied: ServedModel) -> None:
    untied.publish(seed=40)
    [old] = untied.generate(untied.request(PROMPT))
    version = untied.publish(seed=41)
    for completion in untied.generate(*[untied.request(PROMPT, seed=i, max_tokens=40) for i in range(4)]):
        expected = untied.logprobs(PROMPT, completion.token_ids).numpy()
        assert set(completion.policy_versions.tolist()) == {version}
        assert np.abs(expected - completion.logprobs).max() < 1e-4
    assert np.abs(untied.logprobs(PROMPT, old.token_ids).numpy() - old.logprobs).max() > 0.5


# Caught: a control call that waits for an answer of a dead engine core until its deadline.
def test_a_killed_engine_ends_its_requests_and_its_control_calls_with_an_error(untied: ServedModel) -> None:
    engine = untied.engine
    path, manifest = untied.write_snapshot()

    async def scenario() -> list[Any]:
        running = asyncio.ensure_future(engine.generate(untied.request(PROMPT, max_tokens=300)))
        await engine.generate(untied.request(PROMPT, max_tokens=2))
        os.kill(engine._processes[0].pid, signal.SIGKILL)
        ended = await asyncio.gather(running, engine.pause(), return_exceptions=True)
        late = await asyncio.gather(
            engine.generate(untied.request(PROMPT)),
            engine.pause(),
            engine.apply(path, manifest),
            engine.resume(),
            return_exceptions=True,
        )
        return [*ended, *late]

    for failure in untied.await_(scenario()):
        assert isinstance(failure, EngineError)
        assert "restart the engine" in str(failure)
    untied.await_(engine.close())
    with pytest.raises(EngineError):
        untied.generate(untied.request(PROMPT))
