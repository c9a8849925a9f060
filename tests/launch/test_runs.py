"""Whole runs as a user starts them: real processes, sockets, vLLM and gloo. What they learn, how they end."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest
from commands import END_S, START_S, child, overrides, started

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_the_tiny_model_learns_within_the_bound_and_leaves_a_whole_run_directory(tmp_path: Path):
    with started(tmp_path, "asyncrl.cli", "train", *overrides(tmp_path)) as run:
        assert run.wait(600) == 0, run.text()
        metrics = run.metrics()
        rewards = [m["critic/score/mean"] for m in metrics]
        assert [m["training/policy_version"] for m in metrics] == list(range(1, 61))
        assert sum(rewards[:3]) / 3 < 0.3
        assert sum(rewards[-10:]) / 10 > 0.7
        assert max(m["staleness/max"] for m in metrics) <= 2
        assert max(m["staleness/max"] for m in metrics) > 0, "nothing was asynchronous"
        assert run.text().splitlines()[-1] == f"done: {run.run}"
        assert run.text().count("version ") >= 60
        assert_run_directory(run.run)
        assert [name for name in metrics[-1] if not is_documented(name)] == []
        run.assert_nothing_is_left()


def is_documented(metric: str) -> bool:
    """Whether docs/metrics.md has it, written `area/name` or `area/{name,other}`; of a reward, by its form."""
    area, name = metric.split("/", 1)
    if area == "reward":
        return name == "exact_match/mean"
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    if by_age := re.fullmatch(r"(.*)/staleness_\d+", name):
        listed = re.findall(rf"`{area}/(?:\{{([^}}]*)\}}|(\w+))/staleness_<n>`", text)
        return by_age[1] in {one for many, single in listed for one in (many or single).split(",")}
    parts = name.rsplit("/", 1)
    prefix = f"`{area}/" + (f"{parts[0]}/" if len(parts) > 1 else "")
    listed = re.findall(re.escape(prefix) + r"(?:\{([^}]*)\}|([\w*]+))`", text)
    names = {one for many, single in listed for one in (many or single).split(",")}
    return parts[-1] in names or "*" in names


def assert_run_directory(path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trained = [json.loads(line) for line in (path / "trajectories/version_000060.jsonl").open()]
    assert len(trained) == 16 * 8
    assert all(t["status"] == "scored" and t["reward"] in (0.0, 1.0) for t in trained)
    assert all(t["prompt"] == t["answer"][::-1] + "=" for t in trained)
    assert all((t["text"].strip() == t["answer"]) == (t["reward"] == 1.0) for t in trained)
    assert all(59 - version <= 2 for t in trained for version in t["versions"])
    events = [json.loads(line) for line in (path / "events.jsonl").open()]
    names = {"generate", "reward", "wait", "step", "publish", "verify", "pause", "apply"}
    assert names <= {event["name"] for event in events}
    assert all(e["start_s"] <= e["end_s"] for e in events)
    assert "max_staleness: 2" in (path / "config.yaml").read_text()
    assert sorted(p.name for p in (path / "logs").iterdir()) == ["learner-0.log", "rollout-server-0.log"]
    assert AutoModelForCausalLM.from_pretrained(path / "model").num_parameters() == 404_736


def run_from_two_terminals(tmp_path: Path, learner_command: list[str], *more: str) -> None:
    """A learner, then a rollout server that connects to where it says; both end well and leave nothing."""
    short = overrides(tmp_path, "learner.max_versions=3", *more)
    with started(tmp_path, *learner_command, "learner", *short) as learner:
        deadline = time.monotonic() + START_S
        while not (found := re.search(r"--connect (\S+)", learner.text())):
            assert learner.process.poll() is None, learner.text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        command = ["rollout-server", *short, "--connect", found[1]]
        with started(tmp_path, "asyncrl.cli", *command, name="server") as server:
            assert learner.wait() == 0, learner.text() + server.text()
            assert server.wait(END_S) == 0, server.text()
            assert [m["training/policy_version"] for m in learner.metrics()] == [1, 2, 3]
            server.assert_nothing_is_left()
        learner.assert_nothing_is_left()


def test_the_same_run_from_two_terminals(tmp_path: Path):
    run_from_two_terminals(tmp_path, ["asyncrl.cli"])


ENDLESS = ["learner.max_versions=100000", "learner.lr=1e-5"]


def test_ctrl_c_ends_everything(tmp_path: Path):
    with started(tmp_path, "asyncrl.cli", "train", *overrides(tmp_path, *ENDLESS)) as run:
        run.wait_for_versions(2)
        run.process.send_signal(signal.SIGINT)
        assert run.wait(END_S) == 130, run.text()
        assert run.text().splitlines()[-1].startswith("asyncrl: interrupted")
        run.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("role", "says"),
    [
        ("rollout-server", r"^asyncrl: rollout-server-0 was killed by SIGKILL"),
        ("learner", r"^asyncrl: learner-0 was killed by SIGKILL"),
        ("engine", r"^asyncrl: rollout-server.*engine"),
    ],
)
@pytest.mark.slow
def test_a_killed_process_ends_the_run_with_the_first_cause_last(tmp_path: Path, role: str, says: str):
    with started(tmp_path, "asyncrl.cli", "train", *overrides(tmp_path, *ENDLESS)) as run:
        run.wait_for_versions(2)
        child(run, role).kill()
        assert run.wait(END_S) == 1, run.text()
        assert re.search(says, run.text().splitlines()[-1]), run.text()
        run.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("role", [None, "rollout-server"])
def test_a_killed_launcher_takes_its_children_with_it_and_a_killed_server_its_engine(
    tmp_path: Path, role: str | None
):
    # Mutation: no `end_with_parent` in vllm_plugin.py -> VLLM::EngineCore is left, for ever.
    with started(tmp_path, "asyncrl.cli", "train", *overrides(tmp_path, *ENDLESS)) as run:
        run.wait_for_versions(2)
        orphaned = [child(run, role)] if role else []
        run.process.kill()
        for process in orphaned:
            process.kill()
        run.wait(END_S)
        deadline = time.monotonic() + END_S
        while run.relatives() and time.monotonic() < deadline:
            time.sleep(0.5)
        run.assert_nothing_is_left()


@pytest.mark.slow
def test_two_ranks_under_torchrun_with_a_server_from_another_terminal(tmp_path: Path):
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "asyncrl.cli"]
    run_from_two_terminals(tmp_path, torchrun, "learner.num_ranks=2")


@pytest.mark.slow
def test_two_ranks_and_two_servers_on_one_node(tmp_path: Path):
    more = ["learner.max_versions=4", "learner.num_ranks=2", "rollout.num_servers=2"]
    with started(tmp_path, "asyncrl.cli", "train", *overrides(tmp_path, *more)) as run:
        assert run.wait(600) == 0, run.text()
        assert run.metrics()[-1]["rollout/servers"] == 2
        run.assert_nothing_is_left()


def test_ctrl_c_while_the_engine_starts_ends_everything(tmp_path: Path):
    with started(tmp_path, "asyncrl.cli", "train", *overrides(tmp_path, *ENDLESS)) as run:
        deadline = time.monotonic() + START_S
        while not (run.run / "logs/rollout-server-0.log").exists():
            assert time.monotonic() < deadline, run.text()
            time.sleep(0.1)
        time.sleep(3.0)  # into the import of torch and vLLM
        run.process.send_signal(signal.SIGINT)
        assert run.wait(END_S) == 130, run.text()
        run.assert_nothing_is_left()
