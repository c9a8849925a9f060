"""verl's recorded GSM8K scores, and where the default grammar differs from them.

The folder is ASYNCRL_GOLDENS, by default tests/data: inputs and outputs of the peers' own scorers.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.envs.gsm8k import gsm8k_flexible, gsm8k_strict
from asyncrl.envs.gsm8k_verl import verl_gsm8k_flexible, verl_gsm8k_strict

FOLDER = Path(os.environ.get("ASYNCRL_GOLDENS") or Path(__file__).parents[1] / "data")
CASES: list[dict[str, Any]] = json.loads((FOLDER / "golden_gsm8k_reward.json").read_text())
VERL = [case for case in CASES if case["peer"] == "verl"]
SCORERS = {"strict": verl_gsm8k_strict, "flexible": verl_gsm8k_flexible}

DIFFERENCES = {  # text: (gsm8k_strict, verl_gsm8k_strict, gsm8k_flexible, verl_gsm8k_flexible)
    "answer_colon_comma": (0, 0, 1, 0),
    "answer_is_period": (0, 0, 1, 0),
    "answer_tag_comma_dollar": (0, 0, 1, 0),
    "answer_tag_text": (0, 0, 1, 0),
    "boxed_fraction": (0, 0, 1, 0),
    "comma_millions": (1, 1, 1, 0),
    "comma_thousands": (1, 1, 1, 0),
    "comma_trailing": (0, 1, 1, 0),
    "decimal_no_lead": (1, 0, 1, 0),
    "decimal_zero": (1, 0, 1, 0),
    "decimal_zeros": (1, 0, 1, 0),
    "dollar": (1, 0, 1, 1),
    "dollar_decimal": (1, 0, 1, 1),
    "eos_text": (0, 1, 1, 1),
    "fraction": (1, 0, 1, 0),
    "ground_truth_with_comma": (1, 0, 1, 1),
    "latex_inline": (1, 0, 1, 1),
    "leading_zero": (1, 0, 1, 0),
    "long_tail_after_answer": (1, 0, 1, 0),
    "long_tail_with_number": (1, 0, 1, 0),
    "marker_and_boxed_disagree": (1, 1, 1, 0),
    "marker_just_outside_300": (1, 0, 1, 1),
    "minus_zero": (1, 0, 1, 0),
    "no_marker_number_last_dot": (0, 0, 1, 0),
    "no_marker_number_then_word": (0, 0, 1, 0),
    "no_space": (1, 0, 1, 1),
    "percent": (0, 1, 1, 1),
    "plus_sign": (1, 0, 1, 1),
    "range": (0, 0, 1, 0),
    "tab_after_marker": (1, 0, 1, 1),
    "trailing_dot": (1, 0, 1, 0),
    "two_spaces": (1, 0, 1, 1),
    "unicode_minus": (1, 0, 1, 0),
    "unicode_minus_vs_5": (0, 0, 0, 1),
}


@pytest.mark.parametrize("case", VERL, ids=[case["id"].partition("gsm8k_reward/")[2] for case in VERL])
def test_the_verl_scorers_equal_verl_on_every_recorded_text(case: dict[str, Any]) -> None:
    # Catches: a window of 301 characters, the first marker, commas stripped by flexible, "." skipped when alone.
    scorer = SCORERS[case["params"].get("method", "strict")]  # the default of verl's own entry point
    score = scorer(**inputs_of(case), format_score=case["params"].get("format_score", 0.0))
    assert score == case["outputs"]["score"]


def test_the_default_scorers_differ_from_verl_exactly_where_the_docs_say() -> None:
    texts = {case["id"].rpartition("/")[2]: inputs_of(case) for case in CASES if inputs_of(case)["answer"]}
    assert len(texts) == 81
    scorers = (gsm8k_strict, verl_gsm8k_strict, gsm8k_flexible, verl_gsm8k_flexible)
    scores = {name: tuple(scorer(**text) for scorer in scorers) for name, text in texts.items()}
    assert {name: s for name, s in scores.items() if s[0] != s[1] or s[2] != s[3]} == DIFFERENCES


def test_the_docs_list_every_difference() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in page.splitlines() if line.startswith("| `")]
    listed = {cells[0].strip(" `"): tuple(map(int, cells[2:6])) for cells in rows if len(cells) == 7}
    assert listed == DIFFERENCES


def test_an_answer_with_its_working_is_cut_to_the_number() -> None:
    # As verl prepares openai/gsm8k: what follows "#### ", without commas.
    assert verl_gsm8k_strict("#### 1,072", "48/2 = 24\n#### 1,072") == 1.0


def inputs_of(case: dict[str, Any]) -> dict[str, str]:
    return {"completion": case["inputs"]["text"], "answer": case["inputs"].get("ground_truth") or ""}
