"""The coordinator's side of evaluations: grants their prompts, takes the answers, reports the numbers.

Which prompts go where is decided in evaluation.py. An evaluation has credits of its own, so that it neither
waits behind training nor stops it: half as many requests a server as training may have there, and all that
training leaves unused. The engine takes requests in the order in which they come.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from asyncrl.config import Config
from asyncrl.coordinator.evaluation import Evaluation, Evaluations
from asyncrl.coordinator.mailbox import Refusal
from asyncrl.coordinator.servers import ServerState
from asyncrl.coordinator.status import RunStatus
from asyncrl.envs.dataset import Dataset, TokenizedRow
from asyncrl.envs.eval_report import EvalReport, evaluate
from asyncrl.envs.order import eval_seed
from asyncrl.envs.rows import answer_of
from asyncrl.errors import WireError
from asyncrl.run_directory import PromptText, RunDirectory
from asyncrl.stream.codec import Received
from asyncrl.stream.messages import AnyMessage, EvalFinished, EvalLease
from asyncrl.stream.sizes import max_eval_completion_tokens
from asyncrl.types import Int32, SamplingSpec, Span, TrajectoryGroup

Send = Callable[[ServerState, AnyMessage, Int32 | None], Awaitable[None]]


class EvalSide:
    """The coordinator hands it the evaluation messages of servers, and runs `report` beside its loop."""

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        evaluations: Evaluations,
        send: Send,
        status: RunStatus,
        directory: RunDirectory,
    ) -> None:
        self._config = config
        self._dataset = dataset
        self._sampling = eval_sampling(config)
        self._evaluations = evaluations
        self._send = send
        self._status = status
        self._directory = directory
        self._ended: asyncio.Queue[Evaluation] = asyncio.Queue()
        self._unreported: list[Evaluation] = []

    @property
    def is_done(self) -> bool:
        """Whether every evaluation that began has ended and is written down."""
        return not self._evaluations.live and not self._unreported

    async def lease(self, servers: list[ServerState]) -> None:
        """Grants prompts to the servers at a version under evaluation while credits last, the least busy first."""
        while granted := self._next_lease(servers):
            server, evaluation, row_index = granted
            if evaluation.began_s is None:
                evaluation.began_s = time.monotonic()
            self._count_leases(server)
            kept = self._dataset[row_index]
            seeds = [
                eval_seed(self._config.seed, evaluation.version, row_index, sample)
                for sample in range(self._config.eval.num_samples)
            ]
            lease = EvalLease(evaluation.version, row_index, seeds, self._sampling, kept.row)
            await self._send(server, lease, kept.token_ids)

    def _next_lease(self, servers: list[ServerState]) -> tuple[ServerState, Evaluation, int] | None:
        if not self._evaluations.live:
            return None
        num_offered = Counter(server.offered for server in servers)
        ready = (s for s in servers if s.is_connected and self._evaluations.has_work_for(s))
        for server in sorted(ready, key=lambda s: (s.num_eval_leases, s.peer)):
            fair_share = self._evaluations.fair_share(num_offered[server.version])
            is_free = server.num_eval_leases < min(self._max_leases(server), fair_share)
            if is_free and (granted := self._evaluations.grant(server)):
                return server, *granted
        return None

    def _max_leases(self, server: ServerState) -> int:
        """Prompts that a server evaluates at once: half of its requests, or what training does not use."""
        group_size = self._config.rollouts_per_group
        num_requests = server.max_groups_in_flight * group_size
        unused = num_requests - server.num_leases * group_size
        return max(1, max(num_requests // 2, unused) // self._config.eval.num_samples)

    def take(self, server: ServerState, received: Received) -> None:
        """Handles an EvalFinished. Raises WireError for tokens of another version than the evaluation's."""
        finished, group = received.body, received.groups[0]
        assert isinstance(finished, EvalFinished)
        if not self._evaluations.awaits(finished.version, group.ordinal):
            self._status.counts["eval_groups_ignored"] += 1
            return
        evaluation = self._evaluations.live[finished.version]
        found = {version for t in group.trajectories for version in set(t.policy_versions.tolist())}
        if found - {finished.version}:
            rule = f"an evaluation of version {finished.version} has tokens of versions {sorted(found)}"
            evaluation.cut = f"{server.name}: {rule}"
            raise WireError(f"body.group.policy_versions: {rule} (from {server.name!r})")
        evaluation.finish(group.ordinal, group)
        self._count_leases(server)
        server.last_step_s = time.monotonic()
        renamed = [Span(f"eval_{s.name}", s.start_s, s.end_s, s.fields) for s in group.spans]
        self._directory.append_spans(server.name, renamed)

    def refuse(self, refusal: Refusal) -> None:
        """A result that breaks the schema ends its evaluation: the same request would give it again."""
        if refusal.evaluated is not None and self._evaluations.awaits(*refusal.evaluated):
            self._evaluations.live[refusal.evaluated[0]].cut = f"a result was refused: {refusal.error}"

    def look(self, newest_version: int, servers: list[ServerState], now_s: float) -> None:
        """Cuts what cannot go on, and hands over to `report` what has ended."""
        if not self._evaluations.live:
            return
        self._evaluations.cut_out_of_reach(newest_version, servers)
        self._evaluations.cut_overdue(now_s, self._config.timeouts.eval_s)
        for evaluation in self._evaluations.take_ended(now_s):
            self._unreported.append(evaluation)
            self._ended.put_nowait(evaluation)
        for server in servers:
            self._count_leases(server)

    def end(self, reason: str) -> None:
        """The run ends: writes down as cut what is not reported yet. Raises nothing, since it must not hide why."""
        self._evaluations.cut_all(reason)
        self._unreported += self._evaluations.take_ended(time.monotonic())
        for evaluation in self._unreported:
            evaluation.cut = evaluation.cut or f"its numbers were not worked out: {reason}"
            try:
                self._write(evaluation, self._kept(evaluation), None)
            except OSError as error:
                self._status.note(
                    f"the evaluation of version {evaluation.version} could not be written: {error}"
                )
        self._unreported.clear()

    async def report(self, reported: Callable[[], None]) -> None:
        """Runs until cancelled: writes down each evaluation that has ended, then calls `reported`."""
        while True:
            evaluation = await self._ended.get()
            kept = self._kept(evaluation)
            # Bootstraps of many prompts and samples take seconds.
            report = await asyncio.to_thread(self._report, evaluation, kept)
            self._write(evaluation, kept, report)
            self._unreported.remove(evaluation)
            reported()

    def _kept(self, evaluation: Evaluation) -> list[tuple[TokenizedRow, TrajectoryGroup]]:
        """The prompts that have a result, in the order of the data set."""
        return [(self._dataset[row_index], group) for row_index, group in sorted(evaluation.finished.items())]

    def _report(
        self, evaluation: Evaluation, kept: list[tuple[TokenizedRow, TrajectoryGroup]]
    ) -> EvalReport | None:
        """None of an evaluation that was cut: its numbers would be of whichever prompts were quick."""
        if evaluation.cut:
            return None
        return evaluate([(prompt.row, group) for prompt, group in kept], self._config)

    def _write(
        self,
        evaluation: Evaluation,
        kept: list[tuple[TokenizedRow, TrajectoryGroup]],
        report: EvalReport | None,
    ) -> None:
        version, start_s, end_s = evaluation.version, evaluation.since_s, evaluation.ended_s
        assert end_s is not None
        seconds = end_s - start_s
        span = Span("evaluation", start_s, end_s, {"version": version})
        self._directory.append_spans("coordinator", [span])
        prompts = [PromptText(prompt.text, answer_of(prompt.row, self._config.data)) for prompt, _ in kept]
        self._directory.write_evaluation(version, [group for _, group in kept], prompts)
        if report is None:
            self._status.counts["evaluations_cut"] += 1
            self._status.note(
                f"evaluation of version {version} was cut after {seconds:.0f} s: {evaluation.cut}"
            )
        else:
            self._status.counts["evaluations_finished"] += 1
            shown = report.headline().removesuffix(")")
            self._status.note(f"evaluation of version {version}: {shown}, {seconds:.0f} s)")
        self._directory.append_evaluation(
            version,
            {} if report is None else report.metrics | {"timing_s/testing": seconds},
            {
                "seconds": seconds,
                "num_prompts": len(kept) if report is None else report.num_prompts,
                "num_left_out": 0 if report is None else report.num_left_out,
                "cut": evaluation.cut,
            },
        )

    def _count_leases(self, server: ServerState) -> None:
        num_leases = self._evaluations.num_leases_of(server.peer)
        if num_leases != server.num_eval_leases:
            server.count_leases(server.num_leases, time.monotonic(), num_eval_leases=num_leases)


def eval_sampling(config: Config) -> SamplingSpec:
    """How the completions of evaluations are sampled."""
    return SamplingSpec(
        temperature=config.eval.temperature,
        max_completion_tokens=max_eval_completion_tokens(config),
        stop=config.rollout.stop,
        top_p=config.eval.top_p,
        top_k=config.eval.top_k,
    )
