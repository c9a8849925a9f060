"""Real worker processes: deadlines, deaths, cancellation."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.envs.env import RewardOutcome
from asyncrl.envs.reward_pool import RewardPool
from asyncrl.errors import ConfigError
from asyncrl.types import Status

REWARDS = """
import os, subprocess, sys, time

def behave(completion, row):
    if completion == "bomb":
        return 9 ** 9 ** 9
    if completion == "sleep":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        with open(row["pids"], "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        time.sleep(60)
    if completion == "print":
        print("not a frame"); sys.stdout.write("x" * 5000); sys.stdout.flush(); os.write(1, b"raw")
    if completion == "exit":
        os._exit(3)
    if completion == "raise":
        raise ValueError("two\\nlines")
    return {"nan": float("nan"), "inf": float("inf"), "huge": 1e308, "text": "1", "none": None}.get(completion, 0.5)
"""

Check = Callable[[RewardPool], Awaitable[Any]]


@pytest.fixture
def behave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "behaving_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return "behaving_rewards:behave"


def run(reward: str, check: Check, num_workers: int = 1, timeout_s: float = 10.0) -> None:
    """Runs `check` in a pool, and holds that no child process outlives the pool."""

    async def main() -> None:
        async with asyncio.timeout(60), RewardPool(reward, "answer", num_workers, timeout_s) as pool:
            await check(pool)

    before = set(psutil.Process().children(recursive=True))
    asyncio.run(main())
    assert set(psutil.Process().children(recursive=True)) - before == set()


def wait_until_gone(pid: int) -> None:
    try:
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            process.wait(10)
    except psutil.NoSuchProcess:
        pass


def test_a_built_in_scores_in_a_subprocess() -> None:
    async def check(pool: RewardPool) -> None:
        outcome = await pool.score(r"\boxed{\frac{1}{3}}", {"answer": "1/3"})
        assert outcome == RewardOutcome(1.0, Status.SCORED)

    run("gsm8k_flexible", check)


def test_bombs_time_out_and_the_pool_stays_as_large_as_it_was(behave: str) -> None:
    async def check(pool: RewardPool) -> None:
        outcomes = await asyncio.gather(*(pool.score("bomb", {}) for _ in range(4)))
        assert [outcome.status for outcome in outcomes] == [Status.REWARD_TIMEOUT] * 4
        assert [outcome.reward for outcome in outcomes] == [None] * 4
        assert "ran past 0.5 s" in outcomes[0].detail
        # Two at once, as before: a shrunken pool would need one after the other.
        assert (
            await asyncio.gather(*(pool.score("good", {}) for _ in range(2)))
            == [(0.5, Status.SCORED, "")] * 2
        )
        statistics = pool.statistics()
        assert (statistics.num_timeouts, statistics.num_scored, statistics.num_failed) == (4, 2, 0)
        # Catches: a killed worker that is not put back (a third place would hang, a spare one start a 7th).
        assert statistics.num_processes_started == 6

    run(behave, check, num_workers=2, timeout_s=0.5)


@pytest.mark.parametrize(
    ("completion", "detail"),
    [
        ("nan", "returned nan, not a finite number"),
        ("inf", "returned inf, not a finite number"),
        ("huge", "returned 1e+308, more than 1e+30 in size"),
        ("text", "returned '1', not a finite number"),
        ("none", "TypeError: "),
        ("raise", "ValueError: two lines"),
        ("exit", "the reward's process ended with exit code 3"),
    ],
)
def test_a_failed_reward_is_a_status_with_the_reason_never_a_zero(
    behave: str, completion: str, detail: str
) -> None:
    async def check(pool: RewardPool) -> None:
        outcome = await pool.score(completion, {})
        assert (outcome.reward, outcome.status) == (None, Status.REWARD_FAILED)
        assert detail in outcome.detail
        assert "\n" not in outcome.detail
        assert await pool.score("good", {}) == RewardOutcome(0.5, Status.SCORED)
        statistics = pool.statistics()
        assert (statistics.num_failed, statistics.num_scored) == (1, 1)
        assert statistics.last_failure == outcome.detail
        assert statistics.num_processes_started == (2 if completion == "exit" else 1)

    run(behave, check)


def test_what_a_reward_prints_does_not_disturb_its_result(behave: str) -> None:
    async def check(pool: RewardPool) -> None:
        assert [(await pool.score(text, {})).reward for text in ("print", "print", "good")] == [0.5] * 3

    run(behave, check)


def test_cancelling_a_score_kills_the_worker_and_its_children(behave: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    os.mkfifo(pids)

    async def check(pool: RewardPool) -> None:
        task = asyncio.create_task(pool.score("sleep", {"pids": str(pids)}))
        processes = (await asyncio.to_thread(pids.read_text)).split()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for pid in processes:
            wait_until_gone(int(pid))
        assert await pool.score("good", {}) == RewardOutcome(0.5, Status.SCORED)
        assert pool.statistics().num_cancelled == 1

    run(behave, check)


def test_a_worker_that_died_while_idle_costs_no_reward(behave: str) -> None:
    async def check(pool: RewardPool) -> None:
        (worker,) = psutil.Process().children()
        worker.kill()
        await pool._workers[0]._process.wait()  # until the event loop has seen it
        assert await pool.score("good", {}) == RewardOutcome(0.5, Status.SCORED)

    run(behave, check)


def test_scores_still_running_when_the_pool_closes_fail_instead_of_hanging(behave: str) -> None:
    async def main() -> list[RewardOutcome]:
        async with RewardPool(behave, num_workers=1) as pool:
            tasks = [asyncio.create_task(pool.score("bomb", {})) for _ in range(2)]
            await asyncio.sleep(0.1)
        return await asyncio.wait_for(asyncio.gather(*tasks), 20)

    assert {outcome.status for outcome in asyncio.run(main())} == {Status.REWARD_FAILED}


def test_a_row_that_is_not_json_fails_its_own_score_only(behave: str) -> None:
    async def check(pool: RewardPool) -> None:
        assert (await pool.score("good", {"x": object()})).status == Status.REWARD_FAILED
        assert (await pool.score("good", {})).reward == 0.5

    run(behave, check)


def test_a_reward_that_cannot_be_imported_stops_the_pool_at_its_start() -> None:
    async def check(pool: RewardPool) -> None:
        raise AssertionError("the pool started")

    with pytest.raises(ConfigError, match="No module named 'no_such_module_here'"):
        run("no_such_module_here:f", check, num_workers=2)


def test_workers_end_when_their_parent_is_killed(behave: str, tmp_path: Path) -> None:
    program = (
        "import asyncio\nfrom asyncrl.envs.reward_pool import RewardPool\n"
        "async def main():\n"
        f"    async with RewardPool({behave!r}) as pool:\n"
        "        await pool.score('sleep', {'pids': 'pids'})\n"
        "asyncio.run(main())\n"
    )
    pids = tmp_path / "pids"
    os.mkfifo(pids)
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    worker_child = None
    try:
        worker, worker_child = map(int, pids.read_text().split())
        parent.kill()
        wait_until_gone(worker)
        assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE
    finally:
        parent.kill()
        parent.wait()
        if worker_child is not None:
            os.kill(worker_child, 9)


def test_a_worker_imports_neither_torch_nor_the_config_tree() -> None:
    program = "import sys, asyncrl.envs.reward_worker; print([m for m in ('torch', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
