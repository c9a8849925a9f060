"""What the README and the docs name exists, and the configuration they show loads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import asyncrl
from asyncrl.config import Config, all_keys, load_config, validate_config
from asyncrl.config.renames import ABSENT
from asyncrl.errors import ConfigError

ROOT = Path(__file__).parent.parent
STUB = """
import pathlib
import asyncrl.launch.run

def run_until_done(config, *, resume):
    from asyncrl.envs.reward_checks import resolve_rewards

    resolve_rewards(config)
    print(config.reward[0].name, config.model, config.learner.max_versions, sep="\\n")
    folder = pathlib.Path(__file__).parent
    (folder / "metrics.jsonl").write_text('{"critic/score/mean": 0.5}')
    return folder

asyncrl.launch.run.run_until_done = run_until_done
"""
"""What a script meets instead of a run: it ends at once."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path):
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path):
    names = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|yaml))`", page.read_text()))
    names -= {
        "my_rewards.py",
        "path/to/file.py",
        "my.yaml",
        "config.yaml",
    }  # a user's own, the run directory's
    folders = [ROOT, ROOT / "asyncrl", ROOT / "configs", *(ROOT / "asyncrl").iterdir()]
    assert [name for name in sorted(names) if not any((folder / name).exists() for folder in folders)] == []


def test_the_readmes_configuration_is_valid_and_its_table_of_renames_names_real_keys():
    text = (ROOT / "README.md").read_text()
    [block] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    validate_config(yaml.safe_load(block))
    keys = set(all_keys(Config))
    renamed = re.findall(r"^\| `[^|]*\| `([a-z_.]+)`", text, re.MULTILINE)
    assert len(renamed) > 5
    assert [key for key in renamed if key not in keys] == []


def test_the_configurations_of_the_data_page_are_valid():
    [block] = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)
    tables = re.split(r"^(?=data:)", block, flags=re.MULTILINE)[1:]
    assert len(tables) == 3
    for table in tables:
        validate_config(yaml.safe_load(table))


def said_of(override: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_config(None, [override])
    return str(refused.value)


def test_a_key_of_the_table_of_renames_is_refused_with_its_name_here():
    # Mutation: drop a name of the table from config/renames.py -> the error does not help.
    rows = re.findall(r"^\| (`.*`) \| `([a-z_.]+)`", (ROOT / "README.md").read_text(), re.MULTILINE)
    renamed = [(name, here) for names, here in rows for name in re.findall(r"`([\w.]+)`", names)]
    assert len(renamed) > 20
    assert [name for name, here in renamed if f"here it is {here}" not in said_of(f"{name}=1")] == []


def test_the_page_says_of_keys_without_a_counterpart_what_the_error_says():
    # Mutation: add a key to config/renames.py, or change what is said of one, without the page.
    _, _, table = (ROOT / "docs" / "migrating.md").read_text().partition("## Keys without a counterpart")
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", table, re.MULTILINE)
    written = {key: said.replace("`", "") for keys, said in rows for key in re.findall(r"`([\w.]+)`", keys)}
    assert written == ABSENT


def test_verls_command_and_ours_say_the_same():
    # Mutations: a key that does not exist here, or another than the error for verl's names; another value.
    text = (ROOT / "docs" / "migrating.md").read_text()
    rows = re.findall(r"^  ([\w.]+)=(\S+) +'?([a-z_.]+)=([^'\s]+)'?", text, re.MULTILINE)
    assert len(rows) == 15
    load_config(None, [f"{key}={ours}" for _, _, key, ours in rows])
    for verl, value, key, ours in rows:
        assert re.search(rf"(here it is|did you mean) {re.escape(key)}\b", said_of(f"{verl}={value}")), verl
        if key not in ("learner.minibatches", "reward", "run.trackers"):
            assert value == ours


def test_trls_script_and_ours_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Mutation: an argument that Trainer does not have; a table that the configuration refuses.
    text = (ROOT / "docs" / "migrating.md").read_text()
    [block] = re.findall(r"```python\ntrainer = GRPOTrainer\(.*?```", text, re.DOTALL)
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path))
    lines = [line[51:] for line in block.splitlines()[1:-1]]
    names = {
        "accuracy": "exact_match",
        "brevity": "gsm8k_strict",
        "dataset": [{"prompt": "a", "answer": "b"}],
    }
    script = "\n".join(lines).replace("result = trainer.train()", "")
    scope: dict[str, Any] = {"asyncrl": asyncrl, **names}
    exec(script, scope)
    config: Config = scope["trainer"].config
    assert config.learner.prompts_per_batch * config.rollout.group_size == 64
    assert "per_device_train_batch_size=64" in block
    assert [reward.weight for reward in config.reward] == [1.0, 0.1]
    assert (config.rollout.max_completion_tokens, config.learner.lr, config.learner.max_versions) == (
        256,
        1e-6,
        500,
    )


def test_the_readmes_script_is_a_run_with_its_own_reward(tmp_path: Path):
    # Mutations: an argument that Trainer does not have; a reward that no other process can import.
    text = (ROOT / "README.md").read_text()
    [script] = re.findall(r"```python\n# first_word.py\n(.*?)```", text, re.DOTALL)
    (tmp_path / "first_word.py").write_text(script)
    (tmp_path / "sitecustomize.py").write_text(STUB)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "first_word.py")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    name, model, versions, printed = done.stdout.splitlines()
    assert name == f"{(tmp_path / 'first_word.py').resolve()}:first_word"
    assert (model, versions) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "16")
    assert printed.startswith("0.5 ")


def test_every_make_target_of_the_readme_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(named) >= 2
    assert set(named) <= targets
