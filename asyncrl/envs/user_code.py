"""Functions of the user's own, named in the config as `module:attr`; the current folder is importable."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from asyncrl.errors import ConfigError, one_line


def import_function(spec: str, key: str) -> Callable[..., Any]:
    """The function that `spec`, a `module:attr`, names; `key` is the config key for the error.

    Raises ConfigError with the reason when it cannot be imported or called.
    """
    module_name, _, attr = spec.partition(":")
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{key} {spec!r}: importing {module_name!r} failed with {one_line(error)}; "
            "modules are looked for in the current folder and among the installed packages"
        ) from error
    function = getattr(module, attr, None)
    if function is None:
        names = [name for name in vars(module) if not name.startswith("_")]
        raise ConfigError(f"{key} {spec!r}: {module_name!r} has no {attr!r}{did_you_mean(attr, names)}")
    if not callable(function):
        raise ConfigError(f"{key} {spec!r} is a {type(function).__name__}; name a function")
    return function


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest choice, else an empty string."""
    close = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
