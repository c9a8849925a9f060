"""Demonstration tasks that learn on two CPU cores: endless generators `f(seed)` of rows, by name.

`rev4` and `sort4` are for the tiny model, whose warm-up (models/tiny.py) leaves it right about one time in
five; `first_word` is for a small instruct model. All are scored by the reward `exact_match`.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_WORD_LIST = """
act age air ant arm art ash axe bag bat bed bee big box boy bus can cap car cat cow cry cup cut day dog
dry ear egg eye fan fat few fig fix fly fog fox fun gas gem gum gun hat hen hip hot ice ink jam jar jet
job key kid kit lap law leg lid lip log lot man map mat mix mud net new nut oak oil old owl pan pea pen
pet pie pig pin pot rag ram rat red rib rod row rug sad saw sea shy sky sun tax tea ten tie tin toe top
toy tub van wax web wet win zip zoo
"""
WORDS = tuple(_WORD_LIST.split())
"""Common words of three letters; all different, so that the first of three is unambiguous."""


def rev4(seed: int) -> Iterator[dict[str, Any]]:
    """`abcd=` -> `dcba`: four lower-case letters, reversed."""
    rng = random.Random(f"rev4 {seed}")
    while True:
        letters = "".join(rng.choices(string.ascii_lowercase, k=4))
        yield {"prompt": f"{letters}=", "answer": letters[::-1]}


def sort4(seed: int) -> Iterator[dict[str, Any]]:
    """`3142=` -> `1234`: four digits, sorted."""
    rng = random.Random(f"sort4 {seed}")
    while True:
        digits = "".join(rng.choices(string.digits, k=4))
        yield {"prompt": f"{digits}=", "answer": "".join(sorted(digits))}


def first_word(seed: int) -> Iterator[dict[str, Any]]:
    """The first of three words, as a chat with two worked turns."""
    rng = random.Random(f"first_word {seed}")
    while True:
        words = rng.sample(WORDS, 3)
        yield {"prompt": [*_WORKED_TURNS, _question(words)], "answer": words[0]}


def _question(words: Sequence[str]) -> dict[str, str]:
    return {"role": "user", "content": f"First word of: {' '.join(words)}"}


_WORKED_TURNS = [
    {"role": "system", "content": "Answer briefly."},
    _question(["leg", "pen", "pig"]),
    {"role": "assistant", "content": "leg"},
    _question(["hat", "map", "bus"]),
    {"role": "assistant", "content": "hat"},
]

TASKS: dict[str, Callable[[int], Iterator[dict[str, Any]]]] = {
    "rev4": rev4,
    "sort4": sort4,
    "first_word": first_word,
}
