"""Rewards by name, and answers checked before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.envs.rewards import check_answers, resolve_reward
from asyncrl.errors import ConfigError, DataError


def test_exact_match_ignores_only_the_white_space_around() -> None:
    reward = resolve_reward("exact_match")
    assert reward(" dcba\n", {"answer": "dcba"}) == 1.0
    assert reward("dc ba", {"answer": "dcba"}) == 0.0
    assert reward("Dcba", {"answer": "dcba"}) == 0.0


def test_the_answer_key_names_the_column() -> None:
    # Catches: a hard-coded "answer" column.
    assert resolve_reward("exact_match", "gold")("a", {"gold": "a", "answer": "b"}) == 1.0


def test_a_number_is_an_answer_too() -> None:
    assert resolve_reward("gsm8k_strict")("#### 18", {"answer": 18}) == 1.0


def test_an_unknown_reward_is_refused_with_the_closest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gsm8k_strict'"):
        resolve_reward("gsm8k_strct")


def test_a_reward_of_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_length_reward.py").write_text(
        "def reward(completion, row):\n    return len(completion)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve_reward("my_length_reward:reward")("abc", {}) == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_here:f", "ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("string:ascii_lettrs", "has no 'ascii_lettrs'; did you mean 'ascii_letters'"),
        ("string:ascii_letters", "is a str; name a function"),
    ],
)
def test_a_reward_that_cannot_be_imported_says_why(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_reward(name)


@pytest.mark.parametrize(
    ("reward", "row", "message"),
    [
        ("exact_match", {"q": "x"}, "row 1 .*column 'answer': missing.*data.answer_key"),
        ("exact_match", {"answer": None}, "None is neither a string nor a number"),
        ("gsm8k_strict", {"answer": "many"}, "'many' holds no number"),
    ],
)
def test_an_answer_that_can_never_be_right_is_refused(reward: str, row: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_answers(reward, [{"answer": "#### 1"}, row], "answer", "train.jsonl")


def test_the_users_own_reward_reads_whatever_columns_it_likes() -> None:
    check_answers("my_module:f", [{}], "answer", "train.jsonl")


def test_a_reward_with_another_signature_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Mutation: only imported, so that it fails in every rollout instead.
    (tmp_path / "batched_rewards.py").write_text("def batched(completions, *, answers): return [0.0]")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"batched_rewards:batched.*f\(completion, row\)"):
        resolve_reward("batched_rewards:batched")
