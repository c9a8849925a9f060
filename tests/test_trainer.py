"""`asyncrl.Trainer`: what a script hands over becomes a configuration that other processes can read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl import ConfigError, Trainer


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "cache"))


def brevity(completion: str, row: dict[str, Any]) -> float:
    return -float(len(completion))


def test_nothing_given_is_what_all_defaults_together_give():
    # Mutation: put tables with None in them -> validation fails.
    config = Trainer().config
    assert (config.model, config.data.train[0].path, config.reward[0].name) == ("tiny", "rev4", "exact_match")


def test_functions_become_the_file_and_name_they_are_imported_from():
    # Mutation: use __module__ -> `tests.test_trainer`, which a reward's process cannot import.
    config = Trainer(reward_funcs=[brevity, "exact_match"], train_dataset="sort4").config
    assert [reward.name for reward in config.reward] == [f"{Path(__file__).resolve()}:brevity", "exact_match"]
    assert config.data.train[0].path == "sort4"


@pytest.mark.parametrize(
    "function",
    [lambda completion, row: 0.0, (lambda: lambda c, r: 1.0)(), len, json.JSONEncoder().encode],
    ids=["lambda", "inner", "built-in", "method"],
)
def test_a_function_that_no_other_process_can_import_is_refused_with_advice(function: Any):
    # Mutation: name it anyway -> the run fails after a minute, in the reward's process.
    with pytest.raises(ConfigError, match=r"reward_funcs: .*define it with `def` in a \.py file"):
        Trainer(reward_funcs=function)


def test_rows_become_a_jsonl_file_that_is_named_by_its_content():
    # Mutation: name it by the time or the process -> two runs on the same rows name two files.
    rows = [{"prompt": "ab=", "answer": "ba"}, {"prompt": "\u00e9=", "answer": "\u00e9"}]
    one, two = (Trainer(train_dataset=iter(rows)).config.data.train[0].path for _ in range(2))
    other = Trainer(train_dataset=rows[:1]).config.data.train[0].path
    assert [json.loads(line) for line in Path(one).read_text().splitlines()] == rows
    assert one == two != other
    assert sorted(path.name for path in Path(one).parent.iterdir()) == sorted(
        [Path(one).name, Path(other).name]
    )


def test_a_row_that_is_no_json_is_named_and_leaves_no_file():
    with pytest.raises(ConfigError, match=r"train_dataset, row 1 \(from 0\): .*set.*JSON"):
        Trainer(train_dataset=[{"prompt": "a"}, {"prompt": "b", "answer": {1}}])


def test_keys_are_put_on_top_of_a_config_and_tables_are_merged():
    # Mutation: replace the table -> group_size of the file is lost.
    config = Trainer(
        config={"rollout": {"group_size": 4}, "learner": {"lr": 1.0}},
        learner={"lr": 1e-5, "prompts_per_batch": 2},
        rollout={"max_completion_tokens": 3},
        max_staleness=0,
        algorithm={"type": "grpo", "scale": "none"},
    ).config
    assert (config.rollout.group_size, config.rollout.max_completion_tokens) == (4, 3)
    assert (config.learner.lr, config.learner.prompts_per_batch, config.max_staleness) == (1e-5, 2, 0)
    assert config.algorithm.scale == "none"


def test_a_misspelt_key_is_refused_as_in_a_file():
    with pytest.raises(ConfigError, match=r"learner\.leraning_rate: unknown key"):
        Trainer(learner={"leraning_rate": 1.0})


def test_a_model_object_needs_its_tokenizer():
    with pytest.raises(ConfigError, match=r"model: a int is neither"):
        Trainer(3)


def test_a_script_that_starts_a_run_while_its_reward_is_imported_says_what_to_do(tmp_path: Path):
    # Mutation: no check -> the import starts a run, which imports the script, and so on.
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncrl\n"
        "def reward(completion, row):\n    return 1.0\n"
        f"asyncrl.Trainer(reward_funcs=reward, run={{'dir': {str(tmp_path)!r}}}).train()\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert '`if __name__ == "__main__":`' in done.stderr.splitlines()[-1]
    assert not list(tmp_path.glob("run-*"))
