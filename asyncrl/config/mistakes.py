"""What is said of each mistake in a configuration: the key as the user wrote it, its value, what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from asyncrl.config.renames import ABSENT, RENAMES
from asyncrl.config.table import all_keys, nested_tables
from asyncrl.config.tree import Config


def explain(error: ValidationError, tree: dict[str, Any]) -> Iterator[str]:
    """One line a mistake: key, value, what is wrong, and what the key means where pydantic only names a type."""
    items = error.errors()
    for item in items:
        path = _key_path(item["loc"], tree)
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            yield from (f"{key}: unknown key{_advice(key)}" for key in _unknown(path, item["input"]))
        elif item["type"] == "too_short" and any(_is_inside(other["loc"], item["loc"]) for other in items):
            pass  # pydantic counts only the items that are right
        elif not path:
            yield message
        elif item["type"] == "value_error" and _names_key(path, message):
            yield f"{path}.{message}"
        elif item["type"] == "missing":
            yield f"{path}: missing from {item['input']!r}{_meaning(path)}"
        elif item["type"] == "value_error":
            is_said = bool(_siblings(_without_indices(path))) or message.startswith(repr(item["input"]))
            value = "" if is_said else f"{item['input']!r}: "
            yield f"{path}: {value}{message}"
        else:
            yield f"{path}: {item['input']!r}: {message}{_meaning(path)}"


def _names_key(path: str, message: str) -> bool:
    """Whether what a table refuses begins with one of its keys."""
    key, separator, _ = message.partition(": ")
    return bool(separator) and f"{_without_indices(path)}.{key}" in set(all_keys(Config))


def _is_inside(location: tuple[int | str, ...], table: tuple[int | str, ...]) -> bool:
    return len(location) > len(table) and location[: len(table)] == table


def _meaning(path: str) -> str:
    """The documentation of the key; empty for one inside a free table."""
    table: Any = Config
    sentence = None
    for key in _without_indices(path).split("."):
        tables = (
            [table] if isinstance(table, type) and issubclass(table, BaseModel) else [*nested_tables(table)]
        )
        fields = [nested.model_fields[key] for nested in tables if key in nested.model_fields]
        if not fields:
            return ""
        table, sentence = fields[0].annotation, fields[0].description
    return f" ({' '.join(sentence.split())})" if sentence else ""


def _key_path(location: tuple[int | str, ...], tree: Any) -> str:
    """Dotted path as the user wrote it: pydantic puts the tags of unions into its own."""
    parts: list[str] = []
    for step, part in enumerate(location):
        if isinstance(tree, dict) and (part in tree or step == len(location) - 1):
            parts.append(str(part))
            tree = tree.get(part)
        elif isinstance(tree, list) and isinstance(part, int):
            parts.append(str(part))
            tree = tree[part]
    return ".".join(parts)


def _without_indices(path: str) -> str:
    """data.train.0.path -> data.train.path"""
    return ".".join(part for part in path.split(".") if not part.isdigit())


def _unknown(path: str, value: Any) -> Iterator[str]:
    """The key itself; of a table that resembles none and has names here, such as verl's `trainer`, every key in it."""
    is_answered = path.rpartition(".")[2] in ABSENT or _nearest(path)
    if isinstance(value, dict) and value and not is_answered:
        for key, item in value.items():
            yield from _unknown(f"{path}.{key}", item)
    else:
        yield path


def _advice(path: str) -> str:
    """What the key is called here or why it has no counterpart, then the nearest of its own table, then the same word
    in another one."""
    key = _without_indices(path)
    last_three, last_two, last = (".".join(key.split(".")[-n:]) for n in (3, 2, 1))
    if renamed := RENAMES.get(last_three) or RENAMES.get(last_two) or RENAMES.get(last):
        return f"; here it is {renamed}"
    if said := ABSENT.get(last_two) or ABSENT.get(last):
        return f"; leave it out: {said}"
    known = sorted(set(all_keys(Config)), key=lambda k: (k.count("."), k))
    elsewhere = [k for k in known if k.endswith(f".{last_two}") or k == last_two]
    elsewhere += [k for k in known if k.rpartition(".")[2] == last]
    if found := _nearest(path) or next(iter(elsewhere), ""):
        return f"; did you mean {found}?"
    parent = key.rpartition(".")[0]
    if siblings := _siblings(parent):
        return f"; {parent or 'the top level'} has: {', '.join(siblings)}"
    return "; no key here resembles it: leave it out, or look into `asyncrl schema`"


def _nearest(path: str) -> str:
    """The key of the same table that is spelt most like it; empty when none is."""
    parent, _, last = _without_indices(path).rpartition(".")
    near = difflib.get_close_matches(last, _siblings(parent), n=1, cutoff=0.6)
    return ".".join([parent, *near] if parent else near) if near else ""


def _siblings(parent: str) -> list[str]:
    """The keys of the table `parent`; empty when there is no such table."""
    known = sorted(set(all_keys(Config)))
    return [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == parent]
