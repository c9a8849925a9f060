"""One lease to one finished group: G rollouts of one prompt, at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from asyncrl.envs.env import Env, Rewards
from asyncrl.envs.group_scoring import GroupScoring
from asyncrl.rollout_server.engine import Completion, Engine, GenerationRequest
from asyncrl.stream.messages import Lease
from asyncrl.types import Int32, Prompt, SamplingSpec, Span, Trajectory, TrajectoryGroup


async def run_group(
    lease: Lease,
    prompt_ids: Int32,
    *,
    env: Env,
    engine: Engine,
    rewards: Rewards,
    sampling: SamplingSpec,
    name: str = "",
) -> TrajectoryGroup:
    """Runs the lease's rollouts. A failed reward is a status of its trajectory; EngineError is raised.

    `name`: what the request ids begin with, unique among the groups that run; empty is by ordinal and redraw.
    The group's spans: `generate` from its first request to its last token (waiting for a slot in the engine
    included), `reward` from its first reward to its last. Answers are scored as they are finished, except by
    rewards that need the whole group: the sampled answers in one call, the greedy ones, which those must not be
    compared with, in another.
    """
    prompt = Prompt(lease.ordinal, prompt_ids, lease.row)
    clock = _Clock()
    name = name or f"{lease.ordinal}.{lease.redraw}"
    num_sampled = len(lease.seeds) - lease.num_greedy
    of_sampled, of_greedy = (
        GroupScoring(rewards, lease.row, num_rollouts, timed=lambda: clock.running("reward"))
        for num_rollouts in (num_sampled, lease.num_greedy)
    )

    async def rollout(sample: int) -> Trajectory:
        is_greedy = sample >= num_sampled

        async def generate(context: Int32) -> Completion:
            request_id = f"{name}.{sample}"
            how = msgspec.structs.replace(sampling, temperature=0.0) if is_greedy else sampling
            with clock.running("generate"):
                return await engine.generate(GenerationRequest(request_id, context, lease.seeds[sample], how))

        with (of_greedy if is_greedy else of_sampled).rollout() as score:
            return await env.rollout(prompt, generate, score)

    async with asyncio.TaskGroup() as tasks:
        rollouts = [tasks.create_task(rollout(sample)) for sample in range(len(lease.seeds))]
    trajectories = [task.result() for task in rollouts]
    fields = {"ordinal": lease.ordinal, "tokens": sum(len(t) for t in trajectories)}
    spans = [Span(work, start_s, end_s, fields) for work, (start_s, end_s) in clock.intervals.items()]
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
