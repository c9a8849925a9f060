"""Functions that a configuration names, imported in a process of their own before anything starts.

They may load torch, and whatever else their modules do, the launcher only hears of it.
`python -m asyncrl.launch.function_check FUNCTIONS` is that process, FUNCTIONS being JSON.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.user_code import import_function

PROGRAM = "asyncrl.launch.function_check"
ALL_WELL = "all well"
IMPORT_TIMEOUT_S = 300.0
"""All of them must have been imported by then."""


class NamedFunction(msgspec.Struct, frozen=True):
    """A function of the user's own, and how it will be called."""

    key: str
    """Of the configuration."""
    name: str
    """`module:attr` or `path/to/file.py:attr`."""
    arguments: list[str]
    """By position; the names are for the error."""
    options: dict[str, Any] = {}
    """By name."""


def check_functions(functions: list[NamedFunction]) -> None:
    """Raises ConfigError for one that cannot be imported, or called as it will be."""
    if not functions:
        return
    command = [sys.executable, "-m", PROGRAM, msgspec.json.encode(functions).decode()]
    names = ", ".join(function.name for function in functions)
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{names}: not imported within {IMPORT_TIMEOUT_S:g} s; make the import lighter"
        ) from None
    *_, said = done.stdout.splitlines() or [""]
    if said != ALL_WELL:
        raise ConfigError(
            said or f"{names}: the process that imports this ended with exit code {done.returncode}"
        )


def _problems(functions: list[NamedFunction]) -> Iterator[str]:
    for function in functions:
        try:
            signature = inspect.signature(import_function(function.name, function.key))
            signature.bind(*function.arguments, **function.options)
        except ConfigError as error:
            yield str(error)
        except TypeError as error:
            options = [f"{name}={value!r}" for name, value in function.options.items()]
            call = ", ".join([*function.arguments, *options])
            yield (
                f"{function.key} {function.name!r} cannot be called as it will be, with ({call}): {error}; let it take "
                "these"
            )
        except ValueError:
            pass  # a built-in without a signature


if __name__ == "__main__":
    print("\n" + next(_problems(msgspec.json.decode(sys.argv[1], type=list[NamedFunction])), ALL_WELL))
