"""Functions of the user's own that run on a learner rank: what they raise and give back is theirs, and said to be."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from asyncrl.errors import LearnerError
from asyncrl.user_code import import_function, user_failure


def call_user_function(key: str, spec: str, *arguments: Any, **options: Any) -> Any:
    """What the function that `spec` names gives; `key` is the config key for the error.

    Raises LearnerError, with the exception as its cause, where it raises one.
    """
    function = import_function(spec, key)
    try:
        return function(*arguments, **options)
    except Exception as error:
        raise LearnerError(
            f"{key} {spec!r} failed with {user_failure(error)}; mend it: the rank's log has the traceback"
        ) from error


def token_values(key: str, spec: str, given: Any, like: Tensor, *, should: str) -> Tensor:
    """`given`, one finite value for each of the tokens of `like` [N].

    Raises LearnerError that says what it is instead, and what it `should` be.
    """
    if not isinstance(given, Tensor) or given.shape != like.shape:
        found = f"a tensor {[*given.shape]}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise LearnerError(f"{key} {spec!r} gave {found}; {should}")
    if num_bad := int((~given.detach().isfinite()).sum()):
        raise LearnerError(
            f"{key} {spec!r} gave NaN or Inf for {num_bad} of {len(given)} tokens; give a finite value for each: look "
            "for a division by 0, or the exp or log of something out of range"
        )
    return given
