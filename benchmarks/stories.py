"""A task with long answers: the model is asked for a story, and hardly ever ends one within 64 tokens.

`stories:rows` is a generator for `data.train`, `stories:reward` its reward. It is not meant to be learnt;
it gives every completion the same length, and every group rewards that differ.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from asyncrl.envs.tasks import WORDS


def rows(seed: int) -> Iterator[dict[str, Any]]:
    """Chats that ask for a long story about two words."""
    rng = random.Random(f"stories {seed}")
    while True:
        one, other = rng.sample(WORDS, 2)
        request = f"Tell me a long story about a {one} and a {other}."
        yield {"prompt": [{"role": "user", "content": request}]}


def reward(completion: str, row: dict[str, Any]) -> float:
    """The share of different words among all words; 0 without words."""
    words = completion.lower().split()
    return len(set(words)) / len(words) if words else 0.0
