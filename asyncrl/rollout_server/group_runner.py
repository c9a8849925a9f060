"""One lease to one finished group: G rollouts of one prompt, at once."""

from __future__ import annotations

import asyncio
import time

from asyncrl.envs.env import Env, Score
from asyncrl.rollout_server.engine import Completion, Engine, GenerationRequest
from asyncrl.stream.messages import Lease
from asyncrl.types import Int32, Prompt, SamplingSpec, Span, Trajectory, TrajectoryGroup


async def run_group(
    lease: Lease, prompt_ids: Int32, *, env: Env, engine: Engine, score: Score, sampling: SamplingSpec
) -> TrajectoryGroup:
    """Runs the lease's rollouts. A failed reward is a status of its trajectory; EngineError is raised."""
    prompt = Prompt(lease.ordinal, epoch=-1, row_index=-1, token_ids=prompt_ids, row=lease.row)

    async def rollout(sample: int) -> Trajectory:
        async def generate(context: Int32) -> Completion:
            request_id = f"{lease.ordinal}.{lease.redraw}.{sample}"
            return await engine.generate(
                GenerationRequest(request_id, context, lease.seeds[sample], sampling)
            )

        return await env.rollout(prompt, generate, score)

    start_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        rollouts = [tasks.create_task(rollout(sample)) for sample in range(len(lease.seeds))]
    trajectories = [task.result() for task in rollouts]
    span = Span(
        "generate",
        start_s,
        time.monotonic(),
        {"ordinal": lease.ordinal, "tokens": sum(len(t) for t in trajectories)},
    )
    return TrajectoryGroup(lease.ordinal, lease.redraw, prompt_ids, trajectories, [span])
