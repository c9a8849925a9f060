"""`math_verify`: whether two mathematical expressions are equal, by the package math-verify (an optional extra).

The package's own deadlines rest on SIGALRM and turn what takes too long into "not equal". They are switched off:
timeouts.reward_s ends the worker process, and the completion has the status reward_timeout instead of a 0.
"""

from __future__ import annotations

import logging
from typing import Any

from asyncrl.envs.gsm8k import MARKER

INSTALL = "pip install 'asyncrl[math]'"
NO_DEADLINE = 0


def math_verify(completion: str, answer: str) -> float:
    r"""1.0 when the completion's last expression equals the answer, else 0.0.

    Read of the completion: LaTeX (`\boxed{...}` first, `$...$`), else a plain number or expression. The answer
    is LaTeX with or without its `$`, after its last `####` when it has one. Raises ValueError for an answer
    that is no expression.
    """
    import math_verify as package

    gold = _parse_gold(answer)
    return float(
        package.verify(
            gold, package.parse(completion, parsing_timeout=NO_DEADLINE), timeout_seconds=NO_DEADLINE
        )
    )


def load_math_verify() -> None:
    """Imports the package (and sympy: seconds), and makes its parsers, which the first comparison waits for."""
    import math_verify as package

    logging.getLogger(package.__name__).setLevel(logging.ERROR)  # it warns that its deadlines are off
    math_verify(r"\boxed{\frac{1}{2}} or 0.5", "1/2")


def _parse_gold(answer: str) -> list[Any]:
    import math_verify as package

    _, _, text = answer.rpartition(MARKER)
    text = text.strip()
    delimited = "$" in text or "\\boxed" in text
    gold = package.parse(text if delimited else f"${text}$", parsing_timeout=NO_DEADLINE)
    if not gold:
        raise ValueError(f"math-verify finds no expression in the answer {answer[-80:]!r}")
    return gold
