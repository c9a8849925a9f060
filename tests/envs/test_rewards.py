"""Rewards by name, their labels, and rows checked before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from reward_cases import request, rewards_config

from asyncrl.config import Config
from asyncrl.envs.reward_checks import check_rows, resolve_rewards
from asyncrl.envs.reward_messages import RewardSpec
from asyncrl.envs.rewards import resolve_reward, reward_labels
from asyncrl.errors import ConfigError, DataError


class Rows(list[dict[str, Any]]):
    """Rows that can say where they are from."""

    def where(self, index: int) -> str:
        return f"train.jsonl, line {index + 1}"


def value(name: str, completion: str, answer: Any, **kwargs: Any) -> float:
    return resolve_reward(RewardSpec(name, kwargs=kwargs)).call(request(completion, answer=answer))


def check(rows: list[dict[str, Any]], *rewards: dict[str, Any], **keys: Any) -> None:
    config: Config = rewards_config(*rewards, **keys)
    check_rows(config, resolve_rewards(config), [Rows(rows)])


def test_exact_match_ignores_only_the_white_space_around() -> None:
    assert value("exact_match", " dcba\n", "dcba") == 1.0
    assert value("exact_match", "dc ba", "dcba") == 0.0
    assert value("exact_match", "Dcba", "dcba") == 0.0


def test_a_number_is_an_answer_too() -> None:
    assert value("gsm8k_strict", "#### 18", 18) == 1.0


def test_a_built_in_takes_its_own_keyword_arguments_and_no_others() -> None:
    assert value("verl_gsm8k_strict", "#### 17", "18", format_score=0.1) == 0.1
    # Mutation: only Python's words -> not what it takes.
    with pytest.raises(
        ConfigError, match=r"gsm8k_strict.*kwargs.*format_score.*it takes none: leave them out"
    ):
        value("gsm8k_strict", "#### 17", "18", format_score=0.1)
    with pytest.raises(ConfigError, match=r"verl_gsm8k_strict.*kwargs.*scroe.*it takes format_score"):
        value("verl_gsm8k_strict", "#### 17", "18", scroe=0.1)


def test_an_unknown_reward_is_refused_with_the_closest_name() -> None:
    # Mutation: a question of its own -> "is unknown; did you mean 'gsm8k_strict'?; use ...".
    with pytest.raises(
        ConfigError,
        match=r"^reward: 'gsm8k_strct' is no reward \(did you mean 'gsm8k_strict'\?\); use exact_match, ",
    ):
        resolve_reward(RewardSpec("gsm8k_strct"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_here:f", "ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("string:ascii_lettrs", r"has no 'ascii_lettrs' \(did you mean 'ascii_letters'\?\); name a function"),
        ("string:ascii_letters", "is a str; name a function"),
        ("no/such/file.py", "no/such/file.py is not a file"),
    ],
)
def test_a_reward_that_cannot_be_imported_says_why(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_reward(RewardSpec(name))


def test_math_verify_is_refused_with_the_command_where_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'asyncrl\[math\]'"):
        resolve_reward(RewardSpec("math_verify"))


def test_resolving_loads_neither_torch_nor_sympy(monkeypatch: pytest.MonkeyPatch) -> None:
    # The launcher does it: the package is only looked for, not imported.
    monkeypatch.delitem(sys.modules, "math_verify", raising=False)
    resolve_reward(RewardSpec("math_verify"))
    assert "math_verify" not in sys.modules


def test_labels_are_the_last_word_and_stay_apart() -> None:
    names = ["exact_match", "mine.rewards:brevity", "/data/rewards.py:brevity", "a/score.py", "model:out/rm/"]
    # Catches: two rewards with one label, whose components would replace each other.
    assert reward_labels(names) == ["exact_match", "brevity", "brevity_2", "score", "rm"]


@pytest.mark.parametrize(
    ("reward", "row", "message"),
    [
        ("exact_match", {"q": "x"}, "line 2, column 'answer': missing.*data.answer_key"),
        ("exact_match", {"answer": None}, "column 'answer': missing"),
        ("exact_match", {"answer": ["a"]}, "'a'. is neither a string nor a number"),
        ("math_verify", {"q": "x"}, "line 2, column 'answer': missing"),
        ("gsm8k_strict", {"answer": "many"}, "'many' holds no number"),
    ],
)
def test_an_answer_that_can_never_be_right_is_refused(reward: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check([{"answer": "#### 1"}, row], {"name": reward})


def test_verls_ground_truth_is_an_answer() -> None:
    check([{"reward_model": {"style": "rule", "ground_truth": "72"}}], {"name": "gsm8k_strict"})


def test_the_answer_key_reaches_into_objects() -> None:
    # Catches: a hard-coded "answer" column.
    check(
        [{"answer": "many", "meta": {"gold": "1"}}],
        {"name": "gsm8k_strict"},
        **{"data.answer_key": "meta.gold"},
    )


def test_the_users_own_reward_reads_whatever_columns_it_likes(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def f(completion, row): return 0.0")
    check([{}], {"name": f"{tmp_path}/own.py:f"})


def test_a_verl_function_that_requires_a_ground_truth_needs_one_in_every_row(tmp_path: Path) -> None:
    # Mutation: not checked -> it compares with None, and every rollout of the run scores 0.
    (tmp_path / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 0.0\n"
        "def no_truth(data_source, solution_str, ground_truth=None): return 0.0\n"
    )
    score, given = {"name": f"{tmp_path}/score.py"}, {"reward_model": {"ground_truth": ["a", {"b": 1}]}}
    check([given, {"answer": 5}], score)
    with pytest.raises(
        DataError, match=r"line 2, column 'answer': missing, and reward '.*score\.py' compares"
    ):
        check([given, {"solution": "5"}], score)
    check([{}], {"name": f"{tmp_path}/score.py:no_truth"})
    check([{}], {**score, "kwargs": {"ground_truth": "5"}})


def test_a_column_that_a_list_reward_takes_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "lists.py").write_text("def f(completions, level, limit, **columns): return [0.0]")
    reward = {"name": f"{tmp_path}/lists.py:f", "kwargs": {"limit": 3}}
    check([{"level": 1}], reward)
    with pytest.raises(
        DataError, match=r"line 2, column 'level': missing, and reward '.*lists\.py:f' takes it"
    ):
        check([{"level": 1}, {}], reward)


def test_every_row_needs_a_reward_that_applies() -> None:
    rows = [{"answer": "1", "data_source": "gsm8k"}, {"answer": "x", "data_source": "code"}]
    math = {"name": "gsm8k_strict", "data_source": ("gsm8k",)}
    with pytest.raises(DataError, match="line 2: no reward applies to its data_source 'code'"):
        check(rows, math)
    # A row is checked by the rewards that apply to it alone: "x" is no number.
    check(rows, math, {"name": "exact_match", "data_source": ("code",)})


def test_a_data_source_that_no_row_has_is_refused_with_those_that_exist() -> None:
    rows = [{"answer": "1", "data_source": "openai/gsm8k"}, {"answer": "1"}]
    with pytest.raises(
        ConfigError, match="no row has the data_source 'gsm8k'; the rows have '', 'openai/gsm8k'"
    ):
        check(rows, {"name": "exact_match"}, {"name": "gsm8k_strict", "data_source": ("gsm8k",)})
