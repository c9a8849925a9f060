"""What the configuration of evaluations refuses, before anything starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from asyncrl.config import load_config
from asyncrl.errors import ConfigError

EVALUATED = ["data.eval=rev4", "eval.every=2"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["eval.every=2"], ["eval.every 2", "data.eval"]),
        (
            ["data.eval=[rev4, {path: sort4, weight: 2}]", "eval.every=1"],
            ["data.eval: ", "weight 2 of sort4"],
        ),
        ([*EVALUATED, "eval.num_samples=4"], ["eval.num_samples 4", "eval.temperature 0"]),
        ([*EVALUATED, "eval.temperature=0.005"], ["eval.temperature", "0.005", "0 for greedy"]),
        ([*EVALUATED, "eval.top_p=0"], ["eval.top_p", "0", "greater than 0"]),
        (["rollout.temperature=0"], ["rollout.temperature", "greater than or equal to 0.01"]),
    ],
)
def test_a_mistake_names_its_keys(overrides: list[str], says: list[str]):
    # Mutation: greedy training (rollout.temperature=0) let through with greedy evaluations.
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert all(words in str(caught.value) for words in says), caught.value


def test_evaluations_may_be_greedy_or_truncate_the_distribution():
    greedy = load_config(None, EVALUATED)
    assert greedy.eval.temperature == 0.0
    sampled = load_config(
        None, [*EVALUATED, "eval.temperature=0.6", "eval.top_p=0.9", "eval.top_k=20", "eval.num_samples=4"]
    )
    assert (sampled.eval.top_p, sampled.eval.top_k) == (0.9, 20)


def test_the_eval_command_without_data_ends_with_exit_code_2_and_says_what_is_missing():
    command = [sys.executable, "-m", "asyncrl.cli", "eval", "configs/tiny.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "data.eval" in done.stderr
    assert done.stdout == ""
