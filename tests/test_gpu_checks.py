"""scripts/gpu_checks.py: what is meant for a GPU runs here in its reduced form, so that only numbers are new there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_checks.py"


def run_checks(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and the lines by the name of their check."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        timeout=400,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"name"')]
    return ended.returncode, {line["name"]: line for line in lines}


# Caught, each by its own check: a mask shifted by one, betas swapped, float32 compute, rows published 1% too large,
# a wrong temperature in the log-probs, an adapter that is not merged.
def test_every_check_that_needs_no_engine_passes_on_a_cpu() -> None:
    code, lines = run_checks("--device", "cpu", "--quick")
    assert {name: line.get("error") for name, line in lines.items() if line["ok"] is False} == {}
    assert code == 0
    assert [name for name, line in lines.items() if line["ok"] is None] == ["attention", "engine", "train"]
    assert lines["engine"]["skipped"] == "--quick"
    assert len(lines) == 13
    assert 0 < lines["gradients_float32"]["figure"]["largest_relative_error"] < 1e-5
    assert 1e-5 < lines["gradients_bfloat16"]["figure"]["largest_relative_error"] < 0.1
    assert lines["update"]["figure"]["packed_tokens"] == 1111


# Caught: the first failure ending the script; exit code 0 after it.
def test_a_failing_check_is_recorded_and_the_next_one_runs() -> None:
    code, lines = run_checks("--device", "cuda", "--only", "environment", "adamw", "engine", "--quick")
    assert code == 1
    assert [(line["name"], line["ok"]) for line in lines.values()] == [
        ("environment", False),
        ("adamw", False),
        ("engine", None),
    ]
    assert lines["adamw"]["error"]
    assert ".py:" in lines["adamw"]["at"]
