"""The GSM8K grammar, case by case."""

from __future__ import annotations

import threading
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.envs.gsm8k import gold_number, gsm8k_flexible, gsm8k_strict, parse_number

PROSE = "\n" + "and that is how it was done. " * 32

BOTH = [  # completion, gold, the score of strict and of flexible
    ("3*14=42\n#### 42", "42", 1.0),
    ("3*14=42\n#### 42", "working\n#### 42", 1.0),
    ("#### 41\nno, wait\n#### 42", "42", 1.0),  # the last marker
    ("#### 42\nno, wait\n#### 41", "42", 0.0),
    ("#### $18.00", "18", 1.0),
    ("#### 18.", "18", 1.0),
    ("#### 18.01", "18", 0.0),
    ("#### 1,234", "1234", 1.0),
    ("#### 1,234,567.50", "1234567.5", 1.0),
    ("#### 12,34", "1234", 0.0),  # not thousands groups
    ("#### 1234,567", "1234567", 0.0),
    ("#### \u22125", "-5", 1.0),
    ("#### -$5", "-5", 1.0),
    ("#### $-5", "-5", 1.0),
    ("#### 5", "-5", 0.0),
    ("#### 18 \u20ac", "18", 1.0),
    ("#### \u00a318", "18", 1.0),
    ("#### 18 dollars.", "18", 1.0),
    ("#### 18 or 19", "18", 0.0),  # a unit has no digits
    ("####18", "18", 1.0),
    ("#### 42" + PROSE, "42", 1.0),
    ("#### 1/2", "0.5", 1.0),
    ("#### 1/0", "0", 0.0),
    ("#### .5", "1/2", 1.0),
    ("", "96", 0.0),
    ("####", "96", 0.0),
    ("#### NaN", "96", 0.0),
    ("#### 1e3", "1000", 0.0),
    ("#### " + "9" * 100_000, "9", 0.0),
    ("#### \u0664\u0662", "42", 0.0),  # only ASCII digits
    ("#### 42", "no number", 0.0),
]

FLEXIBLE = [  # strict gives 0.0 to all of them
    ("so it costs 96", "96", 1.0),
    ("so it costs $1,096.00.", "1096", 1.0),
    ("first 96, then 95", "96", 0.0),
    (r"\boxed{96} of 100", "96", 1.0),
    (r"\boxed{95} or \boxed{96}", "96", 1.0),
    (r"\boxed{\frac{1}{3}}", "1/3", 1.0),
    (r"\boxed{\frac{1}{3}}", "0.33", 0.0),
    ("96\n####", "96", 1.0),
    ("the change is -3", "-3", 1.0),
    ("the change is \u22123", "-3", 1.0),
    ("that leaves 10-3", "3", 1.0),
    (r"\boxed{9^{9^{9^{9}}}}", "2", 0.0),
    (r"\boxed{96", "96", 1.0),
    ("nothing", "96", 0.0),
]


@pytest.mark.parametrize(("completion", "gold", "score"), BOTH)
def test_the_marker_decides_when_it_has_a_number(completion: str, gold: str, score: float) -> None:
    # Catches: rpartition -> partition, no comma check, no currency, no sign mapping.
    assert gsm8k_strict(completion, gold) == score
    assert gsm8k_flexible(completion, gold) == score


@pytest.mark.parametrize(("completion", "gold", "score"), FLEXIBLE)
def test_only_flexible_falls_back_to_boxed_and_then_to_the_last_number(
    completion: str, gold: str, score: float
) -> None:
    # Catches: boxed and last number in the wrong order; runs[-1] -> runs[0].
    assert gsm8k_strict(completion, gold) == 0.0
    assert gsm8k_flexible(completion, gold) == score


def test_a_fraction_scores_the_same_in_a_thread() -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(gsm8k_flexible(r"\boxed{\frac{1}{3}}", "1/3")))
    thread.start()
    thread.join(10)
    assert scores == [1.0]


def test_the_gold_answer_is_read_after_its_marker() -> None:
    assert gold_number("48/2 = <<48/2=24>>24 clips\n#### 1,072") == 1072
    assert gold_number("0.5") == Fraction(1, 2)
    assert gold_number("it is 7") is None


@given(
    st.integers(-(10**12), 10**12), st.sampled_from(["{}", " {} ", "{:,}", "${:,}", "{}.00", "{}.", "{} kg"])
)
@settings(deadline=None, max_examples=150)
def test_every_way_to_write_an_integer_is_that_integer(value: int, form: str) -> None:
    # Catches: dropping the sign, dropping a group after a comma.
    assert parse_number(form.format(value)) == value


@given(st.text(max_size=60))
@settings(deadline=None, max_examples=200)
def test_no_text_raises(text: str) -> None:
    assert gsm8k_strict(text, "1") in (0.0, 1.0)
    assert gsm8k_flexible(text, "1") in (0.0, 1.0)
