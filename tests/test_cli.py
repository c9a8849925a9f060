"""The command as a user types it: its exit codes, what it says, and that a mistake starts no process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl import cli
from asyncrl.config import Config, all_keys
from asyncrl.run_directory import default_run_name

Asyncrl = Callable[..., tuple[int, str, str]]


@pytest.fixture
def asyncrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Asyncrl:
    """Runs `asyncrl words...` in this process and in an empty folder: (exit code, stdout, stderr).

    Whatever it starts fails the test: asyncio's subprocesses are made with subprocess.Popen too.
    """

    def popen(*args: object, **kwargs: object) -> None:
        pytest.fail(f"a process was started: {args} {kwargs.get('args')}")

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["asyncrl", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", popen)
    return run


MISTAKES = [
    ("rollout.n=8", ["rollout.n: unknown key", "here it is rollout.group_size"]),
    ("run.name=../x", ["run.name: '../x'", "Letters, digits"]),
    ("max_stalness=2", ["max_stalness: unknown key", "did you mean max_staleness?"]),
    ("learner.lr=fast", ["learner.lr: 'fast'", "number"]),
    ("rollout.group_size=500", ["rollout.group_size 500", "rollout.max_num_seqs 128", "must fit"]),
    ("rollout.block_size=33", ["rollout.block_size: 33", "multiple of 32", "use 64"]),
    ("mode=colocated", ["mode: 'colocated'", "not built yet", "use 'disaggregated'"]),
    ("data.train=no_such.jsonl", ["no_such.jsonl", "cannot be read", "check data.train"]),
    ("data.train=rev5", ["data.train", "'rev5'", "rev4"]),
    ("reward=exact_macth", ["reward", "'exact_macth'", "exact_match"]),
    ("run.name=taken", ["run.name", "taken exists already", "choose another run.name"]),
    ("rollout.engine_args={model: x}", ["rollout.engine_args.model", "asyncrl sets it", "remove it"]),
]


@pytest.mark.parametrize("command", ["train", "learner", "check"])
@pytest.mark.parametrize(("override", "says"), MISTAKES, ids=[override for override, _ in MISTAKES])
def test_a_mistake_exits_with_2_names_key_value_and_advice_and_starts_nothing(
    command: str, override: str, says: list[str], asyncrl: Asyncrl, tmp_path: Path
):
    # Mutations: return 1 for ConfigError; bring the model before the checks; drop "run.name" from the folders
    # that check_config looks at -> the run directory is found only after the model has been fetched.
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    code, out, err = asyncrl(command, override)
    assert code == 2
    assert err.startswith("asyncrl: ")
    for part in says:
        assert part in err
    assert "Traceback" not in err + out
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--connect", "nowhere"), ["'nowhere'", "HOST:PORT"]),
        (("--connect", "127.0.0.1:4567", "rollout.block_size=33"), ["rollout.block_size: 33", "use 64"]),
        (("--connect", "127.0.0.1:4567", "rollout.engine_args={dtype: half}"), ["engine_args.dtype"]),
        (("--connect", "127.0.0.1:4567", "resources.cores={rollout_server: [4096]}"), ["4096"]),
    ],
)
def test_a_server_by_hand_refuses_its_mistakes_before_it_starts_anything(
    words: tuple[str, ...], says: list[str], asyncrl: Asyncrl, monkeypatch: pytest.MonkeyPatch
):
    # Mutation: check the engine's settings after the model has been fetched -> a process is started.
    monkeypatch.setattr("os.execve", lambda *args: pytest.fail("the process replaced itself"))
    code, _, err = asyncrl("rollout-server", *words)
    assert code == 2
    for part in says:
        assert part in err


def test_all_mistakes_of_a_file_are_listed_at_once(asyncrl: Asyncrl, tmp_path: Path):
    # Mutation: raise at the first mistake -> one line.
    (tmp_path / "bad.yaml").write_text("learner: {lr: fast, num_rank: 2}\nover_age: wait\n")
    code, _, err = asyncrl("train", "bad.yaml")
    assert code == 2
    assert len(err.splitlines()) == 3
    for part in ("learner.lr", "did you mean learner.num_ranks?", "over_age"):
        assert part in err


def test_a_config_file_that_is_not_there_exits_with_2(asyncrl: Asyncrl):
    # Mutation: let OSError through -> a traceback and exit code 1.
    code, _, err = asyncrl("train", "no_such.yaml")
    assert (code, err) == (
        2,
        "asyncrl: no_such.yaml: cannot be read (No such file or directory); name a YAML file\n",
    )


def test_a_files_name_may_hold_an_equals_sign(asyncrl: Asyncrl, tmp_path: Path):
    # Mutation: whatever holds one is an override -> the file is not read.
    (tmp_path / "lr=1.yaml").write_text("max_staleness: 7\n")
    code, out, _ = asyncrl("check", "--resolved", "lr=1.yaml", "model=nobody/no-such-model")
    assert code == 0
    assert "max_staleness: 7" in out


def test_check_prints_its_numbers_starts_nothing_and_shows_the_resolved_config_on_demand(asyncrl: Asyncrl):
    # Mutation: print the file instead of the resolved config -> max_staleness is missing.
    code, out, err = asyncrl("check", "model=nobody/no-such-model", "max_staleness=3")
    assert (code, err) == (0, "")
    assert "max_staleness: 3" not in out
    for row in ("prompts", "a batch", "microbatches", "groups in flight", "port", "learner-0"):
        assert f"\n{row}" in f"\n{out}"
    code, out, err = asyncrl("check", "--resolved", "model=nobody/no-such-model", "max_staleness=3")
    assert (code, err) == (0, "")
    assert "max_staleness: 3" in out


def test_names_are_taken_and_shown_as_they_are_written(asyncrl: Asyncrl, tmp_path: Path):
    # Mutations: CONFIG as a Path (the first override would lose a slash); rich's markup (it would eat "[a]").
    (tmp_path / "rows[a].jsonl").write_text('{"prompt": "ab", "answer": "x"}')
    code, out, err = asyncrl(
        "check", "--resolved", "rollout.stop=['//']", "data.train=rows[a].jsonl", "model=nobody/none"
    )
    assert (code, err) == (0, "")
    assert "\n  stop:\n  - //\n" in out
    assert "1 from rows[a].jsonl;" in " ".join(out.split())


def help_of(*command: str) -> str:
    words = [sys.executable, "-m", "asyncrl.cli", *command, "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    return done.stdout


def test_help_names_every_command():
    # Mutation: rename or drop a command.
    out = help_of()
    listed = re.findall(r"^│ ([a-z-]+) ", out.partition("Commands")[2], re.MULTILINE)
    assert listed == ["train", "learner", "rollout-server", "eval", "check", "data", "export", "schema"]
    assert "[CONFIG] [KEY=VALUE]..." in help_of("train")


def test_help_says_each_thing_once_and_nothing_to_developers():
    # Mutation: show the module's docstring -> a note on imports, and every command a second time.
    prose = " ".join(help_of().partition("Commands")[0].split())
    assert "Exit codes: 0 done, 1 failed, 2 configuration or data are wrong, 130 interrupted" in prose
    assert "docs/" in prose
    assert "Imports nothing" not in prose
    assert "rollout-server" not in prose


def loaded_by(program: str) -> str:
    """Which of the heavy packages a fresh interpreter has loaded after `program`."""
    program += "\nimport sys; print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "program", ["import asyncrl", "import asyncrl; asyncrl.load_config()", "import asyncrl.cli"]
)
def test_importing_asyncrl_loads_nothing_heavy(program: str):
    # Mutation: import asyncrl.launch.run at the top of cli.py -> transformers is loaded.
    assert loaded_by(program) == "[]"


def test_two_runs_that_start_in_the_same_second_get_different_names():
    # Mutation: name the run from the time alone -> one name.
    names = {default_run_name() for _ in range(5)}
    assert len(names) > 1


def test_the_schema_documents_every_key(asyncrl: Asyncrl):
    code, out, _ = asyncrl("schema")
    assert code == 0
    schema = json.loads(out)
    assert schema["properties"]["max_staleness"]["default"] == 2
    assert "versions" in schema["properties"]["max_staleness"]["description"]
    assert schema["additionalProperties"] is False


def test_the_page_of_keys_is_what_the_tree_says(asyncrl: Asyncrl):
    # Mutation: change a key, a default, a bound or a sentence of asyncrl/config/ without the page. To make it anew:
    # asyncrl schema --markdown > docs/configuration.md
    code, out, _ = asyncrl("schema", "--markdown")
    assert code == 0
    assert out == (Path(__file__).parent.parent / "docs" / "configuration.md").read_text()


def test_the_page_of_keys_has_every_key_and_says_what_is_not_built(asyncrl: Asyncrl):
    # Mutations: leave out the tables inside lists and unions; show every value that the type allows as one to use.
    _, out, _ = asyncrl("schema", "--markdown")
    sections = re.split(r"^## ", out, flags=re.MULTILINE)[1:]
    shown = set()
    for section in sections:
        paths = re.findall(r"`([a-z0-9_.]+)`", section.splitlines()[0].partition(" of type ")[0])
        for key in re.findall(r"^\| `([a-z0-9_]+)`", section, re.MULTILINE):
            shown |= {f"{path}.{key}" for path in paths} or {key}
    tables = {key.rpartition(".")[0] for key in all_keys(Config)}
    assert set(all_keys(Config)) - shown <= tables
    assert shown <= set(all_keys(Config))
    assert "| `over_age` | `mask` or `keep` (not built: `wait`, `drop`) | `mask` |" in out
    assert "| `insecure` | true or false (only the default is built) | `false` | Allow a bind" in out
