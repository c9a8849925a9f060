r"""GSM8K's answer grammar: which number a text answers with, and whether it equals the gold one.

strict    the text after the LAST `####`, up to the end of its line.
flexible  the same; without a number there, the last `\boxed{...}`; without one there, the last number.

A number: surrounding spaces, `$`, EUR and GBP signs and trailing dots are stripped; a minus sign may be
U+2212; commas count only as correct thousands groups (1,234 but not 12,34); a unit without digits may
follow after a space; `a/b` and `\frac{a}{b}` are exact fractions. Numbers compare exactly (18 = 18.00,
18 != 18.01). Anything else - nothing, NaN, an exponent, more than 64 characters - is no number and scores
0. The gold answer is read by the same rule: after its last `####` when it has one, else the whole text.
"""

from __future__ import annotations

import re
from fractions import Fraction

MARKER = "####"
MAX_NUMBER_CHARACTERS = 64
CURRENCY = "$\u20ac\u00a3"
MINUS = "\u2212"

_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(rf"(?P<sign>[-+]?)(?P<digits>{_UNSIGNED})(?:/(?P<below>[0-9]+))?(?:\s[^0-9]*)?")
_FRAC = re.compile(r"([-+]?)\\[dt]?frac\{\s*([0-9]+)\s*\}\{\s*([0-9]+)\s*\}")
# A run of digits and separators, with its sign unless that is a subtraction (`7-5` ends in 5).
_LAST_RUN = re.compile(rf"(?:(?<![\w)\]])[-{MINUS}])?[{CURRENCY}]?\.?[0-9](?:[0-9.,/]*[0-9])?")


def gsm8k_strict(completion: str, answer: str) -> float:
    """1.0 when the text after the last `####` is the gold number, else 0.0."""
    return _equal(strict_number(completion), answer)


def gsm8k_flexible(completion: str, answer: str) -> float:
    r"""1.0 when the number after `####`, else in `\boxed{}`, else the last one, is the gold number."""
    return _equal(flexible_number(completion), answer)


def strict_number(completion: str) -> Fraction | None:
    """What `gsm8k_strict` compares with the gold number."""
    return _after_marker(completion)


def flexible_number(completion: str) -> Fraction | None:
    """What `gsm8k_flexible` compares with the gold number."""
    for read in (_after_marker, _boxed, _last_number):
        if (found := read(completion)) is not None:
            return found
    return None


def gold_number(answer: str) -> Fraction | None:
    """The number of a gold answer: after its last `####` when it has one, else the whole text."""
    return _after_marker(answer) if MARKER in answer else parse_number(answer)


def parse_number(text: str) -> Fraction | None:
    """The number that `text` is by the module's grammar, or None."""
    text = text.strip().replace(MINUS, "-").rstrip(". ")
    text = re.sub(rf"^([-+]?)\s*[{CURRENCY}]\s*([-+]?)", r"\1\2", text)
    text = re.sub(rf"\s*[{CURRENCY}]$", "", text).rstrip(". ")
    text = _FRAC.sub(r"\1\2/\3", text)
    match = _NUMBER.fullmatch(text)
    if match is None or len(match["digits"]) + len(match["below"] or "") > MAX_NUMBER_CHARACTERS:
        return None
    value = Fraction(match["digits"].replace(",", ""))
    if match["below"] is not None:
        below = int(match["below"])
        if below == 0:
            return None
        value /= below
    return -value if match["sign"] == "-" else value


def _equal(found: Fraction | None, answer: str) -> float:
    return float(found is not None and found == gold_number(answer))


def _after_marker(text: str) -> Fraction | None:
    _, marker, rest = text.rpartition(MARKER)
    lines = rest.splitlines()
    return parse_number(lines[0]) if marker and lines else None


def _boxed(text: str) -> Fraction | None:
    _, marker, rest = text.rpartition("\\boxed{")
    depth = 1
    for position, character in enumerate(rest if marker else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return parse_number(rest[:position])
    return None


def _last_number(text: str) -> Fraction | None:
    runs = _LAST_RUN.findall(text)
    return parse_number(runs[-1]) if runs else None
