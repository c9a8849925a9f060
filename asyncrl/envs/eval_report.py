"""From the scored groups of an evaluation to its numbers. Called by the coordinator and by `asyncrl eval`.

Torch-free. eval_metrics.py has the formulas; here is which trajectories they are given, under which names.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.config import Config
from asyncrl.envs.eval_metrics import flat_metrics, source_metrics
from asyncrl.envs.gsm8k import flexible_number, strict_number
from asyncrl.envs.reward_messages import is_vote
from asyncrl.envs.rows import source_of
from asyncrl.types import Status, Trajectory, TrajectoryGroup

UNKNOWN_SOURCE = "unknown"
"""What verl calls rows that do not say where they are from."""
_NUMBER_IN_TEXT: dict[str, Callable[[str], Hashable]] = {
    "gsm8k_strict": strict_number,
    "gsm8k_flexible": flexible_number,
}
"""How the built-in rewards read the answer out of a completion; None is an answer too: that of no number."""


@dataclass(frozen=True, slots=True)
class EvalReport:
    """An evaluation's numbers."""

    metrics: dict[str, float]
    num_prompts: int
    """That the numbers are over."""
    num_left_out: int
    """Prompts with a rollout that has no reward: in no number, rather than counted as 0."""

    def headline(self) -> str:
        """`mean@1 0.42 (64 prompts)`, by source where there are several."""
        means = {
            name.removeprefix("val-core/"): value
            for name, value in self.metrics.items()
            if name.startswith("val-core/") and "/mean@" in name
        }
        shown = []
        for name, value in means.items():
            source_and_variable, _, metric = name.rpartition("/")
            source = source_and_variable.rpartition("/")[0]
            shown.append(f"{source} {metric} {value:.3f}" if len(means) > 1 else f"{metric} {value:.3f}")
        left_out = f", {self.num_left_out} left out: no reward" if self.num_left_out else ""
        return f"{', '.join(shown) or 'no numbers'} ({self.num_prompts} prompts{left_out})"


def num_eval_prompts(num_rows: int, config: Config) -> int:
    """How many rows of data.eval an evaluation takes: the first `eval.max_prompts`, or all."""
    return min(num_rows, config.eval.max_prompts or num_rows)


def evaluate(prompts: Sequence[tuple[Mapping[str, Any], TrajectoryGroup]], config: Config) -> EvalReport:
    """The numbers of (row, its group of `eval.num_samples` trajectories), in the order of the data set."""
    by_source: dict[str, list[TrajectoryGroup]] = {}
    num_left_out = 0
    for row, group in prompts:
        if all(t.status is Status.SCORED for t in group.trajectories):
            by_source.setdefault(source_of(row, config.data, UNKNOWN_SOURCE), []).append(group)
        else:
            num_left_out += 1
    trajectories = [t for _, group in prompts for t in group.trajectories]
    metrics = {source: _of_source(source, groups, config) for source, groups in by_source.items()}
    return EvalReport(
        {**flat_metrics(metrics), **_lengths(trajectories)}, len(prompts) - num_left_out, num_left_out
    )


def _of_source(source: str, groups: list[TrajectoryGroup], config: Config) -> dict[str, dict[str, float]]:
    samples = [[_values(t) for t in group.trajectories] for group in groups]
    common = set.intersection(*(set(values) for of_prompt in samples for values in of_prompt))
    names = [name for name in samples[0][0] if name in common]
    variables = {
        name: [[values[name] for values in of_prompt] for of_prompt in samples]
        for name in names
        if not is_vote(name)
    }
    votes: list[list[Hashable]] | None = None
    if answers := [name for name in names if is_vote(name)]:
        votes = [[values[answers[0]] for values in of_prompt] for of_prompt in samples]
    elif (read := _number_reader(source, config)) is not None:
        votes = [[read(t.text) for t in group.trajectories] for group in groups]
    return source_metrics(variables, votes)


def _values(trajectory: Trajectory) -> dict[str, float]:
    """`reward`, and what the rewards say besides: each reward where there are several, and their other numbers.

    The numbers of a single reward go by their own keys, as verl has them: `acc`, not `<reward>/acc`. Answers are
    no variables, and keep their whole names.
    """
    assert trajectory.reward is not None
    components = trajectory.reward_components
    labels = [label for label in components if "/" not in label or label.rpartition("/")[0] not in components]
    if len(labels) == 1:
        return {"reward": trajectory.reward} | {
            name if is_vote(name) else name.removeprefix(f"{labels[0]}/"): value
            for name, value in components.items()
            if name != labels[0]
        }
    return {"reward": trajectory.reward, **components}


def _number_reader(source: str, config: Config) -> Callable[[str], Hashable] | None:
    """How answers to rows of this source are read from the text; None where no built-in reward reads one."""
    for reward in config.reward:
        if reward.name in _NUMBER_IN_TEXT and (not reward.data_source or source in reward.data_source):
            return _NUMBER_IN_TEXT[reward.name]
    return None


def _lengths(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    return {
        "val-aux/response_length/mean": float(np.mean([len(t) for t in trajectories])),
        "val-aux/response_length/clip_ratio": float(
            np.mean([t.finish_reason == "length" for t in trajectories])
        ),
    }
