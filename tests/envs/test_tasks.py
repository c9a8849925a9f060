"""The demonstration tasks' rows."""

from __future__ import annotations

from itertools import islice

import pytest

from asyncrl.envs.tasks import TASKS, WORDS


@pytest.mark.parametrize("name", TASKS)
def test_the_rows_are_a_function_of_the_seed(name: str) -> None:
    task = TASKS[name]
    assert list(islice(task(3), 20)) == list(islice(task(3), 20))
    assert list(islice(task(3), 20)) != list(islice(task(4), 20))


def test_rev4_reverses_and_sort4_sorts() -> None:
    for row in islice(TASKS["rev4"](0), 50):
        assert row["prompt"] == row["answer"][::-1] + "="
        assert len(row["answer"]) == 4
    for row in islice(TASKS["sort4"](0), 50):
        assert sorted(row["prompt"][:4]) == list(row["answer"])
        assert row["prompt"][4:] == "="


def test_first_word_asks_after_two_worked_turns() -> None:
    for row in islice(TASKS["first_word"](0), 50):
        contents = [message["content"] for message in row["prompt"]]
        assert contents[:5] == [
            "Answer briefly.",
            "First word of: leg pen pig",
            "leg",
            "First word of: hat map bus",
            "hat",
        ]
        words = contents[5].removeprefix("First word of: ").split()
        assert words[0] == row["answer"]
        assert len(set(words)) == 3


def test_the_words_are_distinct_and_of_three_letters() -> None:
    assert len(set(WORDS)) == len(WORDS) > 100
    assert {len(word) for word in WORDS} == {3}
