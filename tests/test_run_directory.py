"""The files of a run are the same whatever the process's locale is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

PROGRAM = """
import locale, sys
import numpy as np
from asyncrl.config import load_config
from asyncrl.run_directory import PromptText, RunDirectory
from asyncrl.types import Status, Trajectory, TrajectoryGroup

assert locale.getpreferredencoding(False).upper() in ("ASCII", "US-ASCII", "ANSI_X3.4-1968")
config = load_config("my.yaml", ["run.name=r"])
directory = RunDirectory.create(config)
one = Trajectory(
    np.ones(1, np.int32), np.ones(1, np.uint8), np.zeros(1, np.float32), np.zeros(1, np.int32), 1.0,
    Status.SCORED, "stop", text="\\u6570\\u5b66\\u2028\\U0001f600",
)
groups = [TrajectoryGroup(0, 0, np.ones(1, np.int32), [one])]
prompts = [PromptText("caf\\u00e9", "\\u00e9")]
directory.write_trajectories(1, groups, prompts, None)
directory.write_evaluation(1, groups, prompts)
directory.append_evaluation(1, {"val-core/\\u6570\\u5b66/reward/mean@1": 1.0}, {"cut": ""})
directory.close()
"""


def test_texts_of_any_language_are_written_as_utf_8_in_a_locale_without_them(tmp_path: Path):
    # Mutation: leave the encoding to the locale: the run ends with a UnicodeEncodeError at its first such text.
    (tmp_path / "my.yaml").write_text("data: {system_prompt: Réponds}\n", encoding="utf-8")
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "r"
    for folder in ("trajectories", "evaluations"):
        text = (run / folder / "version_000001.jsonl").read_text(encoding="utf-8")
        record = json.loads(text)
        assert (record["prompt"], record["answer"], record["text"]) == ("café", "é", "数学\u2028😀")
        assert "数学" in text
    assert "val-core/数学/reward/mean@1" in json.loads((run / "evaluations.jsonl").read_bytes())["metrics"]
    assert yaml.safe_load((run / "config.yaml").read_bytes())["data"]["system_prompt"] == "Réponds"
