"""One row: values of every kind that sources give, columns by path, answers."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from asyncrl.config import DataConfig
from asyncrl.envs.rows import answer_of, lookup, shape_row, source_of
from asyncrl.errors import DataError


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array(["a", None], object), ["a", None]),
        (np.datetime64("2024-05-06T07:08:09"), "2024-05-06T07:08:09"),
        (np.array(["2024-05-06"], "datetime64[D]"), ["2024-05-06"]),
        (datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC), "2024-05-06T07:08:09+00:00"),
        (date(2024, 5, 6), "2024-05-06"),
        (Decimal("1.50"), "1.50"),
        (b"caf\xc3\xa9", "café"),
        ((1, (2,)), [1, [2]]),
        ({"a": {"b": np.arange(2)}}, {"a": {"b": [0, 1]}}),
        (2**64 - 1, 2**64 - 1),
        (None, None),
    ],
)
def test_a_value_becomes_plain_json(value: object, plain: object):
    # Catches: np.datetime64 through tolist() (a bare integer in nanoseconds), str(bytes) ("b'caf...'"), True -> 1.
    row = shape_row({"x": value}, {}, "here")
    assert row == {"x": plain}
    assert type(row["x"]) is type(plain)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b"\xff\xfe", "2 bytes that are not UTF-8 text"),
        (np.float64("nan"), "nan is not a finite number"),
        (np.array([1.0, np.inf]), "inf is not a finite number"),
        (timedelta(seconds=1), "a timedelta is not a JSON value"),
        (np.timedelta64(1, "s"), "timedelta64"),
        (2**64, "an integer of more than 64 bits"),
        ({1: "x"}, "an object whose keys are not all strings"),
        ({"deep": "\ud800"}, "a string with lone surrogates"),
        (object(), "a object is not a JSON value"),
    ],
)
def test_a_value_that_is_none_names_its_row_and_column(value: object, problem: str):
    with pytest.raises(DataError, match=r"file\.parquet, row 4, column 'x': ") as caught:
        shape_row({"x": value}, {}, "file.parquet, row 4")
    assert problem in str(caught.value)


def test_a_list_that_holds_itself_is_refused():
    # Catches: no bound on the depth -> RecursionError.
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(DataError, match="nested deeper than 32"):
        shape_row({"x": endless}, {}, "here")


def test_columns_are_taken_from_dotted_paths_and_the_others_stay():
    # Catches: dropping what is not mapped; mapping in place, so that swapped columns read each other's new value.
    raw = {"question": "q", "answer": "a", "meta": {"level": {"value": 3}}}
    columns = {"prompt": "question", "level": "meta.level.value", "question": "answer", "answer": "question"}
    assert shape_row(raw, columns, "here") == {
        "prompt": "q",
        "level": 3,
        "question": "a",
        "answer": "q",
        "meta": {"level": {"value": 3}},
    }


def test_a_column_whose_name_holds_dots_comes_before_the_path():
    assert lookup({"a.b": 1, "a": {"b": 2}}, "a.b") == 1
    assert lookup({"a": {"b": 2}}, "a.b") == 2
    for missing in ("a.c", "a.b.c", "c"):
        with pytest.raises(KeyError):
            lookup({"a": {"b": 2}}, missing)


def test_a_mapped_column_that_is_missing_is_named_with_what_there_is():
    with pytest.raises(
        DataError, match=r"here, column 'qestion': missing; the row has answer, question; .*columns\.prompt"
    ):
        shape_row({"question": "q", "answer": "a"}, {"prompt": "qestion"}, "here")


@pytest.mark.parametrize(
    ("row", "answer_key", "answer"),
    [
        ({"answer": "1", "reward_model": {"ground_truth": "2"}}, "answer", "1"),
        ({"reward_model": {"style": "rule", "ground_truth": "2"}}, "answer", "2"),
        ({"answer": None, "reward_model": {"ground_truth": "2"}}, "answer", "2"),
        ({"answer": "", "reward_model": {"ground_truth": "2"}}, "answer", ""),
        ({"extra_info": {"answer": 3}, "reward_model": {"ground_truth": "2"}}, "extra_info.answer", 3),
        ({"reward_model": "x"}, "answer", None),
        ({}, "answer", None),
    ],
)
def test_the_answer_is_the_answer_key_then_verls_ground_truth(
    row: dict[str, Any], answer_key: str, answer: object
):
    # Catches: ground truth first; `or` instead of None (an empty answer is one).
    assert answer_of(row, DataConfig(answer_key=answer_key)) == answer


@pytest.mark.parametrize(
    ("row", "source"),
    [
        ({"data_source": "openai/gsm8k"}, "openai/gsm8k"),
        ({"data_source": 7}, "7"),
        ({"data_source": ""}, ""),
        # Mutation: str(None) -> rewards and numbers of a source called "None".
        ({"data_source": None}, "other"),
        ({}, "other"),
    ],
)
def test_the_source_is_its_column_unless_that_says_nothing(row: dict[str, Any], source: str) -> None:
    assert source_of(row, DataConfig(), "other") == source
