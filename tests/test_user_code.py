"""Functions of the user's own, by module and by file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.user_code import import_function, names_user_code, split_spec


@pytest.fixture(autouse=True)
def _fresh_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_module_of_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_length_reward.py").write_text("def reward(completion, row): return len(completion)")
    monkeypatch.chdir(tmp_path)
    assert import_function("my_length_reward:reward", "reward")("abc", {}) == 3


def test_a_file_finds_the_modules_beside_it_and_is_no_main(tmp_path: Path) -> None:
    (tmp_path / "beside_user_code.py").write_text("TEN = 10")
    script = tmp_path / "script.py"
    script.write_text(
        "from beside_user_code import TEN\n"
        "def ten(): return TEN\n"
        "if __name__ == '__main__': raise SystemExit('the script ran')\n"
    )
    function = import_function(f"{script}:ten", "reward")
    assert function() == 10
    assert function.__module__.startswith("script_")
    # The same module every time, with its state; the same name in every process.
    assert import_function(f"{script}:ten", "reward") is function
    assert sys.modules[function.__module__].ten is function


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    # Catches: named by its stem alone, so that the second is the first.
    for folder, number in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "json.py").write_text(f"def number(): return {number}")
    numbers = [import_function(f"{tmp_path}/{folder}/json.py:number", "reward")() for folder in "ab"]
    assert numbers == [1, 2]


def test_a_file_of_a_package_finds_the_others_by_relative_imports(tmp_path: Path) -> None:
    # Catches: imported as if it stood alone, so that `from ..` fails; the whole package imported without need.
    inner = tmp_path / "package_of_user_code" / "inner"
    inner.mkdir(parents=True)
    (inner.parent / "numbers.py").write_text("TEN = 10")
    (inner.parent / "__init__.py").write_text("")
    (inner / "__init__.py").write_text("")
    (inner / "relative.py").write_text("from ..numbers import TEN\ndef ten(): return TEN")
    (inner / "alone.py").write_text("def one(): return 1")
    assert import_function(f"{inner}/alone.py:one", "reward")() == 1
    assert "package_of_user_code" not in sys.modules
    function = import_function(f"{inner}/relative.py:ten", "reward")
    assert function() == 10
    assert import_function(f"{inner}/relative.py:ten", "reward") is function


def test_a_file_alone_names_the_default_function(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text("def compute_score(): return 1")
    assert import_function(f"{tmp_path}/score.py", "reward", "compute_score")() == 1
    with pytest.raises(
        ConfigError, match=r"data.train '.*score.py' names no function; write .*score.py:NAME"
    ):
        import_function(f"{tmp_path}/score.py", "data.train")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise RuntimeError('no GPU here')", "importing .*broken.py failed with RuntimeError: no GPU here"),
        ("raise SystemExit(2)", "importing .*broken.py failed with SystemExit: 2"),
        ("def rewrad(): ...", r"has no 'reward' \(did you mean 'rewrad'\?\); name a function"),
    ],
)
def test_a_file_that_cannot_be_used_says_why_and_is_tried_again(
    tmp_path: Path, source: str, message: str
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=message):
        import_function(f"{file}:reward", "reward")
    with pytest.raises(ConfigError, match=message):
        import_function(f"{file}:reward", "reward")


def test_the_forms_of_a_name() -> None:
    assert split_spec("a.b:c") == ("a.b", "c")
    assert split_spec("a/b.py:c") == ("a/b.py", "c")
    assert split_spec("a/b.py") == ("a/b.py", "")
    assert [names_user_code(name) for name in ("a:b", "a/b.py", "exact_match")] == [True, True, False]
