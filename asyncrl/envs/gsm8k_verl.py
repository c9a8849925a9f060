"""GSM8K scored as verl's scorer does, so that its numbers can be compared with; docs/rewards.md lists where gsm8k.py
differs.

Only the last 300 characters of the completion are looked at, and texts are compared, not numbers.

strict    the last `#### NUMBER`, with exactly one space; commas are taken out of it.
flexible  the last run of digits, dots and commas that is more than one dot; commas stay in it.
"""

from __future__ import annotations

import re

from asyncrl.envs.gsm8k import MARKER

LAST_CHARACTERS = 300

_RUN = r"-?[0-9.,]+"
_MARKED = re.compile(rf"{MARKER} ({_RUN})")
_ANY = re.compile(_RUN)


def verl_gsm8k_strict(completion: str, answer: str, format_score: float = 0.0) -> float:
    """1.0 when the number after the last `#### ` is the gold text; `format_score` for any other number there."""
    marked = _MARKED.findall(completion[-LAST_CHARACTERS:])
    return _score(marked[-1].replace(",", "") if marked else None, answer, format_score)


def verl_gsm8k_flexible(completion: str, answer: str, format_score: float = 0.0) -> float:
    """1.0 when the last number is the gold text; `format_score` for any other number."""
    runs = _ANY.findall(completion[-LAST_CHARACTERS:])
    # Where every run is one dot, the first of them counts as found.
    found = next((run for run in reversed(runs) if run != "."), runs[0] if runs else None)
    return _score(found, answer, format_score)


def verl_ground_truth(answer: str) -> str:
    """The gold text: an answer that still holds its working is cut to the number, as verl's preparation does."""
    _, marker, rest = answer.rpartition(MARKER)
    return rest.strip().replace(",", "") if marker else answer


def _score(found: str | None, answer: str, format_score: float) -> float:
    if found is None:
        return 0.0
    return 1.0 if found == verl_ground_truth(answer) else format_score
