"""One lease to one finished group: G rollouts of one prompt, at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from asyncrl.envs.env import Env, RewardOutcome, Score
from asyncrl.rollout_server.engine import Completion, Engine, GenerationRequest
from asyncrl.stream.messages import Lease
from asyncrl.types import Int32, Prompt, SamplingSpec, Span, Trajectory, TrajectoryGroup


async def run_group(
    lease: Lease, prompt_ids: Int32, *, env: Env, engine: Engine, score: Score, sampling: SamplingSpec
) -> TrajectoryGroup:
    """Runs the lease's rollouts. A failed reward is a status of its trajectory; EngineError is raised.

    The group's spans: `generate` from its first request to its last token (waiting for a slot in the engine
    included), `reward` from its first reward to its last.
    """
    prompt = Prompt(lease.ordinal, prompt_ids, lease.row)
    clock = _Clock()

    async def rollout(sample: int) -> Trajectory:
        async def generate(context: Int32) -> Completion:
            request_id = f"{lease.ordinal}.{lease.redraw}.{sample}"
            with clock.running("generate"):
                return await engine.generate(
                    GenerationRequest(request_id, context, lease.seeds[sample], sampling)
                )

        async def scored(completion: str, row: dict[str, Any]) -> RewardOutcome:
            with clock.running("reward"):
                return await score(completion, row)

        return await env.rollout(prompt, generate, scored)

    async with asyncio.TaskGroup() as tasks:
        rollouts = [tasks.create_task(rollout(sample)) for sample in range(len(lease.seeds))]
    trajectories = [task.result() for task in rollouts]
    fields = {"ordinal": lease.ordinal, "tokens": sum(len(t) for t in trajectories)}
    spans = [Span(name, start_s, end_s, fields) for name, (start_s, end_s) in clock.intervals.items()]
    return TrajectoryGroup(lease.ordinal, lease.redraw, prompt_ids, trajectories, spans)


class _Clock:
    """From the first start to the last end of each kind of work."""

    def __init__(self) -> None:
        self.intervals: dict[str, tuple[float, float]] = {}

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        now_s = time.monotonic()
        start_s, _ = self.intervals.setdefault(name, (now_s, now_s))
        try:
            yield
        finally:
            self.intervals[name] = (start_s, time.monotonic())
