"""Which trackers there are, what is refused before a run starts, and that none loads torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from asyncrl import cli
from asyncrl.config import RunConfig, load_config
from asyncrl.errors import ConfigError
from asyncrl.trackers import tracker

NAMES = get_args(get_args(RunConfig.model_fields["trackers"].annotation)[0])


def test_every_tracker_of_the_config_is_a_module_and_no_other():
    # Mutation: add a name to run.trackers without its file.
    folder = Path(tracker.__file__).parent
    assert {path.name.removesuffix("_tracker.py") for path in folder.glob("*_tracker.py")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_one_that_is_not_installed_exits_with_2_and_the_pip_command(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # Mutation: look for trackers when the run has started -> `check` says nothing, and exits with 0.
    for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, f"asyncrl.trackers.{name}_tracker", raising=False)
    monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["asyncrl", "check", f"run.trackers=[{name}]", "model=nobody/no-such"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"run.trackers: {name} cannot be imported" in said
    assert f"pip install {name}" in said


@pytest.mark.parametrize("name", NAMES)
def test_importing_a_tracker_loads_neither_torch_nor_tensorflow(name: str):
    # Mutation: write TensorBoard's files with torch.utils.tensorboard.
    pytest.importorskip(name)
    program = (
        f"import sys; from asyncrl.trackers.tracker import load_tracker; load_tracker({name!r}); "
        "import asyncrl.trackers.delivery; print([m for m in ('torch', 'tensorflow', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.parametrize("project", ["", "a/b", "a\\b", "a#b", "a:b", "x" * 129])
def test_a_project_that_not_every_tracker_takes_is_refused_before_anything_starts(project: str):
    # Mutation: any text -> W&B refuses it when the run has begun, and has nothing of the run.
    with pytest.raises(ConfigError, match=r"run\.project"):
        load_config(None, [f"run.project='{project}'"])


def test_one_tracker_needs_no_list():
    assert load_config(None, ["run.trackers=mlflow"]).run.trackers == ("mlflow",)
    assert load_config(None, ["run.project=math 数学"]).run.project == "math 数学"
