"""Functions of the user's own, named in the config as `module:attr` or `path/to/file.py:attr`.

Modules are found in the current folder and among the installed packages; a file may lie anywhere, and finds
the modules beside it.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.errors import ConfigError, one_line


def import_function(
    spec: str, key: str, default_attr: str | None = None, *, source: bytes | None = None
) -> Callable[..., Any]:
    """The function that `spec` names; `key` is the config key for the error.

    `default_attr` is the function of a file that is named without one; `source` is executed instead of what the
    file holds. Raises ConfigError with the reason when it cannot be imported or called.
    """
    function = import_attribute(spec, key, default_attr, source=source)
    if not callable(function):
        raise ConfigError(f"{key} {spec!r} is a {type(function).__name__}; name a function")
    return function


def import_attribute(
    spec: str, key: str, default_attr: str | None = None, *, source: bytes | None = None
) -> Any:
    """As `import_function`, of whatever kind it is."""
    module_name, attr = split_spec(spec)
    attr = attr or default_attr
    if not attr or not module_name:
        raise ConfigError(f"{key} {spec!r} names no function; write {module_name or 'module'}:NAME")
    if module_name.endswith(".py"):
        module = _import_file(Path(module_name).expanduser(), f"{key} {spec!r}", source)
    else:
        module = _import_module(module_name, f"{key} {spec!r}")
    found = getattr(module, attr, None)
    if found is None:
        names = [name for name in vars(module) if not name.startswith("_")]
        raise ConfigError(
            f"{key} {spec!r}: {module_name!r} has no {attr!r}{did_you_mean(attr, names)}; name a function of it"
        )
    return found


def user_failure(error: BaseException) -> str:
    """`KeyError: 'answer' (my_rewards.py, line 3)`: an exception, and the innermost line of the user's own."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return one_line(error) + where


def read_source(spec: str) -> bytes | None:
    """What the file holds that `spec` names; None where it names none that is there."""
    file = Path(split_spec(spec)[0]).expanduser()
    return file.read_bytes() if file.suffix == ".py" and file.is_file() else None


def split_spec(spec: str) -> tuple[str, str]:
    """(module or file, attr) of `module:attr`, `file.py:attr`, or `file.py`, whose attr is empty."""
    if spec.endswith(".py"):
        return spec, ""
    module_name, _, attr = spec.rpartition(":")
    return module_name, attr


def names_user_code(spec: str) -> bool:
    """Whether `spec` has the form of a function of the user's own."""
    return ":" in spec or spec.endswith(".py")


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the closest choice, else an empty string: it may stand inside a sentence."""
    names = list(choices)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    close = close or difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)  # PPO
    return f" (did you mean {close[0]!r}?)" if close else ""


def _is_users(filename: str) -> bool:
    """Neither asyncrl's, nor an installed package's, nor Python's own."""
    library = (str(Path(__file__).parent), *(sysconfig.get_path(name) for name in ("stdlib", "purelib")))
    return os.path.isabs(filename) and not filename.startswith(library)


def _import_module(name: str, what: str) -> ModuleType:
    _make_importable(os.getcwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{what}: importing {name!r} failed with {one_line(error)}; "
            "modules are looked for in the current folder and among the installed packages"
        ) from error


def _import_file(path: Path, what: str, source: bytes | None) -> ModuleType:
    """The file, or `source` in its place, as a module, executed once a process.

    Its name comes from its whole path: the same in every process, never `__main__`, and never that of another
    module, whatever the file is called. In a package it is the name of a module of that, so that relative imports
    find the others.
    """
    path = path.absolute()
    if not path.is_file():
        raise ConfigError(f"{what}: {path} is not a file; name one that is there")
    name = f"{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    folder = path.parent
    while (folder / "__init__.py").is_file():
        name, folder = f"{folder.name}.{name}", folder.parent
    if name in sys.modules:
        return sys.modules[name]
    _make_importable(str(folder))
    _make_importable(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        exec(compile(path.read_bytes() if source is None else source, path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{what}: importing {path} failed with {one_line(error)}") from error
    return module


def _make_importable(folder: str) -> None:
    if folder not in sys.path and not (folder == os.getcwd() and "" in sys.path):
        sys.path.insert(0, folder)
