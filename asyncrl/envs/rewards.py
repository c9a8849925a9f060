"""The Reward seam: `f(completion, row) -> float`, by name. A new built-in is one line of BUILT_IN.

`completion` is the text without special tokens, `row` the prompt's row of the data set as JSON values.
The launcher resolves the name before anything starts; reward workers resolve it again, in their process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.envs.gsm8k import gold_number, gsm8k_flexible, gsm8k_strict
from asyncrl.envs.user_code import did_you_mean, import_function
from asyncrl.errors import ConfigError, DataError

Reward = Callable[[str, dict[str, Any]], float]


def exact_match(completion: str, answer: str) -> float:
    """1.0 when both are the same text apart from white space around it, else 0.0."""
    return float(completion.strip() == answer.strip())


BUILT_IN: dict[str, Callable[[str, str], float]] = {
    "exact_match": exact_match,
    "gsm8k_strict": gsm8k_strict,
    "gsm8k_flexible": gsm8k_flexible,
}
"""name -> f(completion, answer), where answer is the row's `data.answer_key`."""


def resolve_reward(name: str, answer_key: str = "answer") -> Reward:
    """The reward of that name: a built-in, or `module:attr`. Raises ConfigError with the reason."""
    if (built_in := BUILT_IN.get(name)) is not None:

        def reward(completion: str, row: dict[str, Any]) -> float:
            return built_in(completion, str(row[answer_key]))

        return reward
    if ":" in name:
        own: Reward = import_function(name, "reward")
        _check_signature(own, name)
        return own
    raise ConfigError(
        f"reward {name!r} is unknown{did_you_mean(name, BUILT_IN)}; "
        f"use {', '.join(BUILT_IN)}, or module:attr of f(completion, row) -> float"
    )


def _check_signature(reward: Reward, name: str) -> None:
    """Raises ConfigError for a function that cannot be called as f(completion, row)."""
    try:
        inspect.signature(reward).bind("", {})
    except TypeError as error:
        raise ConfigError(
            f"reward {name!r} cannot be called as f(completion, row): {error}; it scores one completion (a "
            "string) with its row (a dict), and returns a number"
        ) from error
    except ValueError:  # a built-in function whose signature Python cannot tell
        return


def check_answers(name: str, rows: Sequence[dict[str, Any]], answer_key: str, source: str) -> None:
    """Refuses rows that the built-in reward `name` could never score. Raises DataError.

    Rewards of the user's own read whatever columns they like and are not checked.
    """
    if name not in BUILT_IN:
        return
    for index, row in enumerate(rows):
        where = f"{source}, row {index} (from 0), column {answer_key!r}"
        if answer_key not in row:
            columns = ", ".join(sorted(row))
            raise DataError(
                f"{where}: missing, and reward {name!r} compares with it; "
                f"the row has {columns}; set data.answer_key"
            )
        answer = row[answer_key]
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise DataError(f"{where}: {answer!r} is neither a string nor a number")
        if name.startswith("gsm8k") and gold_number(str(answer)) is None:
            raise DataError(f"{where}: {str(answer)[-80:]!r} holds no number that {name!r} can compare with")
