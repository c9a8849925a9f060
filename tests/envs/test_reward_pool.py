"""Real worker processes: deadlines, deaths, cancellation."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from reward_cases import in_pool, request

from asyncrl.envs.env import RewardOutcome
from asyncrl.envs.reward_messages import RewardSpec
from asyncrl.envs.reward_pool import RewardPool
from asyncrl.errors import ConfigError
from asyncrl.types import Status

REWARDS = """
import asyncio, functools, os, subprocess, sys, time

class Stop(BaseException):
    pass

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
    if completion == "leave":
        sys.exit(4)
    if completion == "raise":
        raise ValueError("two\\nlines")
    if completion == "stop":
        raise Stop("everything")
    return {"nan": float("nan"), "inf": float("inf"), "huge": 1e308, "text": "1", "list": [1.0],
            "dict": {"acc": 1.0}}.get(completion, 0.5)

def several(completions, **columns):
    if completions[0] == "short":
        return [1.0]
    if completions[0] == "text":
        return "12"
    return [{"nan": float("nan"), "none": None}.get(text, len(text)) for text in completions]

running = 0
most = 0

async def ask(completion, row):
    global running, most
    running += 1
    most = max(most, running)
    try:
        if completion == "block":
            time.sleep(60)
        if completion == "hang":
            await asyncio.sleep(60)
        if completion == "raise":
            raise TimeoutError("the service did not answer")
        if completion == "cancel":
            raise asyncio.CancelledError("by its own client")
        if completion == "most":
            return most
        await asyncio.sleep(0.2)
        return 0.5
    finally:
        running -= 1

@functools.wraps(ask)
def decorated(*args):
    return ask(*args)
"""

SCORED = RewardOutcome(0.5, Status.SCORED)


@pytest.fixture
def rewards_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "behaving_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return "behaving_rewards"


@pytest.fixture
def behave(rewards_module: str) -> RewardSpec:
    return RewardSpec(f"{rewards_module}:behave")


def impatient(spec: RewardSpec) -> RewardSpec:
    return RewardSpec(spec.name, timeout_s=0.5)


async def score(pool: RewardPool, completion: str, row: dict[str, Any] | None = None) -> RewardOutcome:
    (outcome,) = await pool.score(request(completion, row=row))
    return outcome


def wait_until_gone(pid: int) -> None:
    try:
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            process.wait(10)
    except psutil.NoSuchProcess:
        pass


def test_a_built_in_scores_in_a_subprocess() -> None:
    async def check(pool: RewardPool) -> None:
        outcomes = await pool.score(request(r"\boxed{\frac{1}{3}}", answer="1/3"))
        assert outcomes == [RewardOutcome(1.0, Status.SCORED)]

    in_pool(RewardSpec("gsm8k_flexible"), check)


def test_bombs_time_out_and_the_pool_stays_as_large_as_it_was(behave: RewardSpec) -> None:
    async def check(pool: RewardPool) -> None:
        outcomes = await asyncio.gather(*(score(pool, "bomb") for _ in range(4)))
        assert [outcome.status for outcome in outcomes] == [Status.REWARD_TIMEOUT] * 4
        assert [outcome.reward for outcome in outcomes] == [None] * 4
        assert "ran past 0.5 s" in outcomes[0].detail
        # Two at once, as before: a shrunken pool would need one after the other.
        assert await asyncio.gather(*(score(pool, "good") for _ in range(2))) == [SCORED] * 2
        statistics = pool.statistics()
        assert (statistics.num_timeouts, statistics.num_scored, statistics.num_failed) == (4, 2, 0)
        # Catches: a killed worker that is not put back (a third place would hang, a spare one start a 7th).
        assert statistics.num_processes_started == 6

    in_pool(impatient(behave), check, num_workers=2)


@pytest.mark.parametrize(
    ("completion", "detail"),
    [
        ("nan", "returned nan, not a finite number"),
        ("inf", "returned inf, not a finite number"),
        ("huge", "returned 1e+308, more than 1e+30 in size"),
        ("text", "returned '1', not a finite number"),
        ("list", "returned [1.0], not a finite number"),
        ("dict", "returned a dict without 'score'"),
        ("raise", "ValueError: two lines"),
        ("exit", "the reward's process ended with exit code 3"),
        ("leave", "SystemExit: 4"),
        ("stop", "Stop: everything"),
    ],
)
def test_a_failed_reward_is_a_status_with_the_reason_never_a_zero(
    behave: RewardSpec, completion: str, detail: str
) -> None:
    async def check(pool: RewardPool) -> None:
        outcome = await score(pool, completion)
        assert (outcome.reward, outcome.status) == (None, Status.REWARD_FAILED)
        assert detail in outcome.detail
        assert "\n" not in outcome.detail
        assert await score(pool, "good") == SCORED
        statistics = pool.statistics()
        assert (statistics.num_failed, statistics.num_scored) == (1, 1)
        assert statistics.last_failure == outcome.detail
        assert statistics.num_processes_started == (2 if completion == "exit" else 1)

    in_pool(behave, check)


def test_a_reward_that_raises_names_its_own_line_and_leaves_its_traceback_in_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Mutations: the outermost frame (line 4), or the innermost of all (json's); no traceback, or one a failure.
    file = tmp_path / "mine.py"
    file.write_text(
        "import json\ndef parse(text):\n    return json.loads(text)\ndef f(completion, row): return parse(completion)\n"
    )

    async def check(pool: RewardPool) -> None:
        for _ in range(9):
            outcome = await score(pool, "no json")
            assert outcome.detail == (
                "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (mine.py, line 3)"
            )

    in_pool(RewardSpec(f"{file}:f"), check)
    log = capfd.readouterr().err
    assert log.count("Traceback (most recent call last)") == 1
    assert f'File "{file}", line 3, in parse' in log


def test_a_list_reward_scores_a_group_in_one_call(rewards_module: str) -> None:
    async def check(pool: RewardPool) -> None:
        assert pool.takes_group
        outcomes = await pool.score(request("nan", "none", "four"))
        assert [outcome.status for outcome in outcomes] == ["reward_failed", "scored", "scored"]
        # None is no failure and no 0: the reward does not apply there.
        assert [outcome.reward for outcome in outcomes] == [None, None, 4.0]
        short = await pool.score(request("short", "b"))
        assert [outcome.detail for outcome in short] == [
            "ValueError: it returned 1 values for 2 completions"
        ] * 2
        # Catches: a text taken as a list of its characters.
        assert "not a list" in (await pool.score(request("text", "b")))[1].detail

    in_pool(RewardSpec(f"{rewards_module}:several"), check)


def test_async_calls_run_at_once_in_one_process(rewards_module: str) -> None:
    async def check(pool: RewardPool) -> None:
        outcomes = await asyncio.gather(*(score(pool, "good") for _ in range(70)))
        assert outcomes == [SCORED] * 70
        # Catches: one call at a time (1), or no bound (70).
        assert (await score(pool, "most")).reward == 64
        assert pool.statistics().num_processes_started == 1

    in_pool(RewardSpec(f"{rewards_module}:ask"), check, num_workers=2)


def test_an_async_call_that_hangs_ends_alone(rewards_module: str) -> None:
    async def check(pool: RewardPool) -> None:
        hung, good, raised = await asyncio.gather(*(score(pool, text) for text in ("hang", "good", "raise")))
        assert (hung.status, good) == (Status.REWARD_TIMEOUT, SCORED)
        # Its own TimeoutError is a failure like any other.
        assert raised.status == Status.REWARD_FAILED
        assert raised.detail.startswith("TimeoutError: the service did not answer (")
        assert pool.statistics().num_processes_started == 1

    in_pool(RewardSpec(f"{rewards_module}:ask", timeout_s=1.0), check)


def test_an_async_call_that_cancels_itself_is_a_failure_and_costs_no_other_call(rewards_module: str) -> None:
    async def check(pool: RewardPool) -> None:
        # Mutation: catch Exception alone -> no answer ever comes, and the process is killed at the deadline.
        cancelled, good = await asyncio.gather(score(pool, "cancel"), score(pool, "good"))
        assert (cancelled.status, good) == (Status.REWARD_FAILED, SCORED)
        assert cancelled.detail.startswith("CancelledError: by its own client (")
        assert pool.statistics().num_processes_started == 1

    in_pool(RewardSpec(f"{rewards_module}:ask", timeout_s=20.0), check)


def test_what_a_decorated_async_function_returns_is_awaited(rewards_module: str) -> None:
    async def check(pool: RewardPool) -> None:
        # Mutation: take the coroutine for the value -> "returned <coroutine ...>, not a finite number".
        assert await score(pool, "good") == SCORED
        assert "TimeoutError: the service did not answer" in (await score(pool, "raise")).detail

    in_pool(RewardSpec(f"{rewards_module}:decorated"), check)


def test_a_file_that_is_edited_while_it_runs_scores_as_it_began(tmp_path: Path) -> None:
    file = tmp_path / "edited.py"
    text = "import os\ndef f(completion, row):\n    return os._exit(1) if completion == 'exit' else {}\n"
    file.write_text(text.format(1.0))

    async def check(pool: RewardPool) -> None:
        file.write_text(text.format(2.0))
        assert (await score(pool, "exit")).status == Status.REWARD_FAILED
        values = await asyncio.gather(*(score(pool, "a") for _ in range(2)))
        # Mutations: read the file anew -> 2.0, from the process that takes the dead one's place, or from the
        # second, which starts only now.
        assert [value.reward for value in values] == [1.0, 1.0]
        assert pool.statistics().num_processes_started == 3

    in_pool(RewardSpec(f"{file}:f"), check, num_workers=2)


def test_without_memory_the_kernel_ends_a_worker_before_the_server(behave: RewardSpec) -> None:
    def oom_score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    async def check(pool: RewardPool) -> None:
        (worker,) = psutil.Process().children()
        assert oom_score(worker.pid) == 1000

    if not Path("/proc/self/oom_score_adj").exists():
        pytest.skip("only Linux kills by score")
    in_pool(behave, check)


def test_an_async_call_that_blocks_the_event_loop_is_killed(rewards_module: str) -> None:
    async def check(pool: RewardPool) -> None:
        blocked, beside = await asyncio.gather(score(pool, "block"), score(pool, "hang"))
        assert {blocked.status, beside.status} <= {Status.REWARD_TIMEOUT, Status.REWARD_FAILED}
        assert Status.REWARD_TIMEOUT in {blocked.status, beside.status}
        assert await score(pool, "good") == SCORED
        assert pool.statistics().num_processes_started == 2

    in_pool(RewardSpec(f"{rewards_module}:ask", timeout_s=0.5), check)


def test_cancelling_an_async_call_leaves_the_others_running(rewards_module: str) -> None:
    async def check(pool: RewardPool) -> None:
        hung = asyncio.create_task(score(pool, "hang"))
        good = asyncio.create_task(score(pool, "good"))
        await asyncio.sleep(0.05)
        hung.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hung
        assert await good == SCORED
        assert pool.statistics().num_processes_started == 1

    in_pool(RewardSpec(f"{rewards_module}:ask"), check)


def test_what_a_reward_prints_does_not_disturb_its_result(behave: RewardSpec) -> None:
    async def check(pool: RewardPool) -> None:
        assert [await score(pool, text) for text in ("print", "print", "good")] == [SCORED] * 3

    in_pool(behave, check)


def test_cancelling_a_score_kills_the_worker_and_its_children(behave: RewardSpec, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    os.mkfifo(pids)

    async def check(pool: RewardPool) -> None:
        task = asyncio.create_task(score(pool, "sleep", {"pids": str(pids)}))
        processes = (await asyncio.to_thread(pids.read_text)).split()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for pid in processes:
            wait_until_gone(int(pid))
        assert await score(pool, "good") == SCORED
        assert pool.statistics().num_cancelled == 1

    in_pool(behave, check)


def test_a_worker_that_died_while_idle_costs_no_reward(behave: RewardSpec) -> None:
    async def check(pool: RewardPool) -> None:
        (worker,) = psutil.Process().children()
        worker.kill()
        reading = pool._processes[0]._reading
        assert reading is not None
        await asyncio.wait([reading])  # until the event loop has seen it
        assert await score(pool, "good") == SCORED

    in_pool(behave, check)


def test_scores_still_running_when_the_pool_closes_fail_instead_of_hanging(behave: RewardSpec) -> None:
    async def main() -> list[RewardOutcome]:
        async with RewardPool(behave, num_workers=1) as pool:
            tasks = [asyncio.create_task(score(pool, "bomb")) for _ in range(2)]
            await asyncio.sleep(0.1)
        return await asyncio.wait_for(asyncio.gather(*tasks), 20)

    assert {outcome.status for outcome in asyncio.run(main())} == {Status.REWARD_FAILED}


def test_a_row_that_is_not_json_fails_its_own_score_only(behave: RewardSpec) -> None:
    async def check(pool: RewardPool) -> None:
        assert (await score(pool, "good", {"x": object()})).status == Status.REWARD_FAILED
        assert await score(pool, "good") == SCORED

    in_pool(behave, check)


def test_a_reward_that_cannot_be_imported_stops_the_pool_at_its_start() -> None:
    async def check(pool: RewardPool) -> None:
        raise AssertionError("the pool started")

    with pytest.raises(ConfigError, match="No module named 'no_such_module_here'"):
        in_pool(RewardSpec("no_such_module_here:f"), check, num_workers=2)


def test_workers_end_when_their_parent_is_killed(behave: RewardSpec, tmp_path: Path) -> None:
    program = (
        "import asyncio\n"
        "from asyncrl.envs.reward_messages import RewardRequest, RewardSpec\n"
        "from asyncrl.envs.reward_pool import RewardPool\n"
        "async def main():\n"
        f"    async with RewardPool(RewardSpec({behave.name!r})) as pool:\n"
        "        await pool.score(RewardRequest(['sleep'], [[1]], {'pids': 'pids'}))\n"
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
