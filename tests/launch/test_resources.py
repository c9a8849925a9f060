"""Who gets which cores and devices: only this node's share, only for processes that start here."""

from __future__ import annotations

import os

import pytest

from asyncrl.config import Config, load_config
from asyncrl.errors import ConfigError
from asyncrl.launch import resources
from asyncrl.launch.resources import Placement, place_one_server, place_processes, visible_gpus


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_num_gpus_present", lambda: 8)


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize(
    ("variable", "gpus"),
    [
        (None, ("0", "1", "2", "3", "4", "5", "6", "7")),
        ("4,5", ("4", "5")),
        (" 6, 2 ", ("6", "2")),
        ("GPU-8f1c,MIG-77aa", ("GPU-8f1c", "MIG-77aa")),
        ("", ()),
        ("-1", ()),
        ("3,-1,4", ("3",)),
        ("7,8,6", ("7",)),
    ],
)
def test_the_visible_gpus_are_the_entries_that_cuda_would_show(
    variable: str | None, gpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    # Mutation: answer range(len(entries)) -> "4,5" becomes ("0", "1"), other people's GPUs.
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus(Config()) == gpus
    assert visible_gpus(load_config(None, ["resources.devices=cpu"])) == ()


def test_without_a_driver_no_gpu_is_visible_whatever_the_variable_says(monkeypatch: pytest.MonkeyPatch):
    # Mutation: trust the variable alone -> ("GPU-8f1c",).
    monkeypatch.setattr(resources, "_num_gpus_present", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f1c")
    assert visible_gpus(Config()) == ()


@pytest.mark.usefixtures("eight_gpus")
def test_cuda_without_a_visible_gpu_is_refused_with_the_variable(monkeypatch: pytest.MonkeyPatch):
    # Mutation: return () instead of raising -> the run would train on the CPU.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(ConfigError, match=r"resources\.devices.*CUDA_VISIBLE_DEVICES=-1"):
        visible_gpus(load_config(None, ["resources.devices=cuda"]))


def test_children_see_entries_of_the_visible_list_ranks_first():
    # Mutation: number the devices from 0 -> the first rank sees "0".
    config = load_config(
        None, ["learner.num_ranks=2", "rollout.num_servers=2", "rollout.tensor_parallel_size=2"]
    )
    gpus = ["4", "5", "GPU-a", "GPU-b", "7", "6"]
    placed = place_processes(config, cores=[0, 1], gpus=gpus)
    seen = [p.environment()["CUDA_VISIBLE_DEVICES"] for p in (*placed.learner, *placed.rollout_servers)]
    assert seen == ["4", "5", "GPU-a,GPU-b", "7,6"]


def test_a_process_on_a_cpu_sees_no_gpu():
    # Mutation: leave the variable as it is when there are no GPUs -> the child inherits all of them.
    assert Placement(cores=(3,)).environment()["CUDA_VISIBLE_DEVICES"] == ""


def test_too_few_gpus_are_refused_with_their_names():
    # Mutation: compare with num_ranks alone -> no error.
    with pytest.raises(ConfigError, match=r"need 2 GPUs, and this node shows 1 \(GPU-a\)"):
        place_processes(Config(), cores=[0], gpus=["GPU-a"])


def test_roles_that_do_not_start_here_need_no_gpus():
    # Mutation: ignore `start` -> ConfigError, 3 GPUs are not there.
    config = load_config(None, ["rollout.num_servers=2"])
    placed = place_processes(config, cores=[0, 1], gpus=["5"], start=("learner",))
    assert [p.gpus for p in placed.learner] == [("5",)]
    assert placed.rollout_servers == ()
    nobody = place_processes(config, cores=[0, 1], gpus=["5"], start=())
    assert (nobody.learner, nobody.rollout_servers) == ((), ())


@pytest.mark.parametrize(
    ("overrides", "start", "learner", "servers"),
    [
        ([], ("learner", "rollout-server"), [(2, 3)], [(0, 1)]),
        ([], ("learner",), [(2, 3)], []),
        ([], ("rollout-server",), [], [(0, 1)]),
        (["rollout.num_servers=0"], ("learner",), [(0, 1, 2, 3)], []),
        (["learner.num_ranks=2"], ("learner",), [(2,), (3,)], []),
        (["learner.num_ranks=3"], ("learner",), [(2, 3)] * 3, []),
        (
            ["resources.cores={learner: [0, 3], rollout_server: [1]}"],
            ("learner", "rollout-server"),
            [(0, 3)],
            [(1,)],
        ),
        (["resources.cores={learner: [2]}"], ("learner", "rollout-server"), [(2,)], [(0, 1, 2, 3)]),
    ],
)
def test_cores_are_split_by_role_also_when_one_role_starts_alone(
    overrides: list[str],
    start: tuple[str, ...],
    learner: list[tuple[int, ...]],
    servers: list[tuple[int, ...]],
):
    # Mutation: all cores to a learner that starts alone -> (0, 1, 2, 3), on top of the servers that connect.
    placed = place_processes(load_config(None, overrides), cores=[0, 1, 2, 3], gpus=[], start=start)
    assert [p.cores for p in placed.learner] == learner
    assert [p.cores for p in placed.rollout_servers] == servers


def test_one_core_is_shared():
    # Mutation: split a single core -> the servers get none.
    placed = place_processes(Config(), cores=[7], gpus=[])
    assert (placed.learner[0].cores, placed.rollout_servers[0].cores) == ((7,), (7,))


@pytest.mark.parametrize(
    ("num_servers", "cores", "gpus"),
    [(1, (0, 1), ("5", "6")), (3, (0, 1), ("5", "6")), (0, (0, 1, 2, 3), ("4", "5"))],
)
def test_a_server_started_by_hand_gets_the_servers_cores_and_the_first_gpus_that_no_rank_of_its_node_uses(
    num_servers: int, cores: tuple[int, ...], gpus: tuple[str, ...]
):
    # Mutation: the first visible GPUs always -> on one node it meets the learner's rank on GPU 4.
    config = load_config(None, [f"rollout.num_servers={num_servers}", "rollout.tensor_parallel_size=2"])
    placed = place_one_server(config, cores=[0, 1, 2, 3], gpus=["4", "5", "6"])
    assert placed == Placement(cores, gpus)


def test_cores_that_this_process_may_not_use_are_refused():
    # Mutation: return the configured cores unchecked -> no error before sched_setaffinity.
    config = load_config(None, ["resources.cores={learner: [0], rollout_server: [4096]}"])
    with pytest.raises(ConfigError, match=r"resources\.cores\.rollout_server: \[4096\].*\[0, 1\]"):
        place_processes(config, cores=[0, 1], gpus=[])
    assert place_processes(config, cores=[0, 1], gpus=[], start=("learner",)).learner[0].cores == (0,)


def test_a_child_that_was_pinned_to_its_cores_can_still_read_the_whole_config():
    # Mutation: hold resources.cores to sched_getaffinity in the config's validator -> the pinned child fails.
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        config = load_config(None, ["resources.cores={learner: [0], rollout_server: [4095]}"])
    finally:
        os.sched_setaffinity(0, before)
    assert config.resources.cores == {"learner": (0,), "rollout_server": (4095,)}
