"""The user's own reward, imported in a process of its own before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from asyncrl.envs.reward_import import import_traits
from asyncrl.envs.reward_messages import RewardSpec, RewardTraits
from asyncrl.errors import ConfigError


def write(folder: Path, import_time: str) -> RewardSpec:
    """A reward whose file does this when it is imported."""
    file = folder / "at_import.py"
    file.write_text(
        f"import os, subprocess, sys, threading, time\n{import_time}\ndef f(completions, level): ...\n"
    )
    return RewardSpec(f"{file}:f")


def test_what_the_reward_is_like_comes_back(tmp_path: Path) -> None:
    traits = import_traits(write(tmp_path, ""))
    assert traits == RewardTraits(takes_group=True, columns=("level",))


@pytest.mark.parametrize(
    ("import_time", "message"),
    [
        # Mutation: imported in this process -> the test session ends with code 0, as `asyncrl train` did.
        ("os._exit(0)", "its process ended with exit code 0 while it was imported"),
        ("os.kill(os.getpid(), 9)", "its process ended by SIGKILL while it was imported"),
        ("raise ValueError('no licence')", r"importing .*at_import\.py failed with ValueError: no licence"),
        ("raise KeyboardInterrupt", "importing it failed with KeyboardInterrupt"),
        ("def f(text): ...\nsys.exit()", r"importing .*at_import\.py failed with SystemExit"),
    ],
)
def test_an_import_that_fails_says_how(tmp_path: Path, import_time: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        import_traits(write(tmp_path, import_time))


def test_an_import_that_never_ends_is_ended(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"was not imported within 2 s; make its import lighter"):
        import_traits(write(tmp_path, "while True: time.sleep(1)"), timeout_s=2.0)
    assert psutil.Process().children() == []


def test_a_thread_that_the_import_starts_holds_nobody_up(tmp_path: Path) -> None:
    # Mutation: wait for the process instead of ending it -> the deadline passes.
    traits = import_traits(write(tmp_path, "threading.Thread(target=time.sleep, args=(600,)).start()"), 60.0)
    assert traits.takes_group
    assert psutil.Process().children() == []


def test_nothing_of_the_import_reaches_the_launcher(tmp_path: Path) -> None:
    # Mutation: imported in the launcher -> its path and modules change, and what it prints is on stdout.
    (tmp_path / "beside_at_import.py").write_text("")
    spec = write(tmp_path, "import beside_at_import\nprint('hello')")
    program = (
        "import sys\nfrom asyncrl.config import load_config\n"
        "from asyncrl.envs.reward_checks import resolve_rewards\n"
        "path = list(sys.path)\n"
        f"(traits,) = resolve_rewards(load_config(None, ['reward={spec.name}']))\n"
        "print(traits.columns, sys.path == path, 'beside_at_import' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "('level',) True False\n", done.stderr
    assert "hello" in done.stderr
