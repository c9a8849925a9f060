"""What a person sees of a run: a live panel on a terminal, one line a version elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.coordinator.status import RunStatus

REFRESH_S = 0.5
SPARKS = "▁▂▃▄▅▆▇█"

T = TypeVar("T")


async def show(status: RunStatus, title: str, console: Console) -> None:
    """Runs until cancelled."""
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=False) as live:
            try:
                while True:
                    live.update(panel(status, title))
                    await asyncio.sleep(REFRESH_S)
            finally:
                live.update(panel(status, title))
    seen_version = seen_notes = 0
    try:
        while True:
            seen_version, seen_notes = _print_news(status, console, seen_version, seen_notes)
            await asyncio.sleep(REFRESH_S)
    finally:
        _print_news(status, console, seen_version, seen_notes)


def _print_news(status: RunStatus, console: Console, seen_version: int, seen_notes: int) -> tuple[int, int]:
    for note in _newest(status.notes, status.num_notes - seen_notes):
        console.print(Text(note, style="yellow"), soft_wrap=True)
    for metrics in _newest(status.recent, status.version - seen_version):
        console.print(Text(line(metrics, status.max_versions)), soft_wrap=True)
    return status.version, status.num_notes


def _newest(values: deque[T], count: int) -> list[T]:
    return list(values)[max(0, len(values) - count) :]


def line(metrics: dict[str, float], max_versions: int) -> str:
    """One version in one line of fixed order."""
    m = metrics
    return (
        f"version {m['training/policy_version']:4.0f}/{max_versions}  reward {short(m['critic/score/mean'])}  "
        f"loss {m.get('actor/pg_loss', 0.0):+.4f}  staleness {m['staleness/mean']:.2f} max "
        f"{m['staleness/max']:.0f}  {m['rollout/tokens_per_s']:.0f} tok/s  step {m['timing_s/step']:.2f} s  "
        f"{who_waits(m)}"
    )


def short(reward: float) -> str:
    """Three decimals; of a reward too small for them, two digits."""
    return f"{reward:.3f}" if reward == 0 or abs(reward) >= 0.01 else f"{reward:.2g}"


def who_waits(metrics: dict[str, float]) -> str:
    """Which side the other one waits for."""
    learner, rollout = metrics["idle/learner"], metrics["idle/rollout"]
    return f"learner waits {learner:.0%}, rollout servers idle {rollout:.0%}"


def panel(status: RunStatus, title: str) -> Panel:
    """The live view: progress, reward curve, staleness, speed, who waits for whom, and the last notes."""
    table = Table.grid(padding=(0, 2))
    elapsed_s = time.monotonic() - status.started_s
    table.add_row("phase", f"{status.phase}, {elapsed_s:.0f} s")
    table.add_row("version", f"{status.version} of {status.max_versions}")
    table.add_row("", ProgressBar(total=status.max_versions, completed=status.version, width=40))
    if status.recent:
        m = status.recent[-1]
        rewards = [metrics["critic/score/mean"] for metrics in status.recent]
        table.add_row("reward", f"{short(rewards[-1])}  {sparkline(rewards[-40:])}")
        table.add_row(
            "staleness",
            f"mean {m['staleness/mean']:.2f}, max {m['staleness/max']:.0f}, "
            f"masked {m['staleness/masked_share']:.1%}",
        )
        table.add_row(
            "speed",
            f"{m['rollout/tokens_per_s']:.0f} completion tokens/s, {m['timing_s/step']:.2f} s a version",
        )
        table.add_row("waiting", who_waits(m))
        if failed := m["rollout/failed"]:
            table.add_row("failed", f"{failed:.0f} rollouts of the last batch have no reward")
    notes = [Text(note, style="yellow") for note in list(status.notes)[-3:]]
    return Panel(Group(table, *notes), title=title, title_align="left")


def sparkline(values: list[float]) -> str:
    """Values as a row of bars, lowest to highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in values)
