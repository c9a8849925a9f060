"""What is said of each mistake in a configuration: the key as the user wrote it, its value, what would be right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from asyncrl.config.recipes import find_recipe, merged
from asyncrl.config.renames import ABSENT, RENAMES, VALUES
from asyncrl.config.table import all_keys, nested_tables
from asyncrl.config.tree import Config
from asyncrl.user_code import did_you_mean


def explain(error: ValidationError, tree: dict[str, Any]) -> Iterator[str]:
    """One line a mistake: key, value, what is wrong, and what the key means where pydantic only names a type."""
    items = error.errors()
    tree = _with_recipe(tree)
    for item in items:
        path = _key_path(item["loc"], tree)
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            kind = _kind(item["loc"], path)
            yield from (f"{key}: unknown key{_advice(key, kind)}" for key in _unknown(path, item["input"]))
        elif item["type"] == "too_short" and any(_is_inside(other["loc"], item["loc"]) for other in items):
            pass  # pydantic counts only the items that are right
        elif not path:
            yield message
        elif (value := _name(item["input"])) and (here := VALUES.get(f"{path.rpartition('.')[2]}={value}")):
            yield f"{path}: {value!r} is called otherwise here; use {here}"
        elif item["type"] == "value_error" and _names_key(path, message):
            yield f"{path}.{message}"
        elif item["type"] == "missing":
            yield f"{path}: missing from {item['input']!r}{_meaning(path)}"
        elif item["type"] == "value_error":
            is_said = bool(_siblings(_without_indices(path))) or message.startswith(repr(item["input"]))
            value = "" if is_said else f"{item['input']!r}: "
            yield f"{path}: {value}{message}"
        else:
            yield f"{path}: {_wrong_value(path, item)}{_meaning(path)}"


def _wrong_value(path: str, item: ErrorDetails) -> str:
    """The value, and what would be one, of what pydantic itself refuses."""
    value, message, context = item["input"], item["msg"], item.get("ctx", {})
    if item["type"] == "union_tag_invalid":
        name, names = _name(value), re.findall(r"'([^']*)'", context["expected_tags"])
        return f"{name!r} is no type{did_you_mean(name, names)}; there are {', '.join(names)}"
    if item["type"] == "literal_error" and isinstance(value, str):
        near = did_you_mean(value, re.findall(r"'([^']*)'", context["expected"]))
        return f"{value!r}{near}: {message}"
    if item["type"] in ("model_type", "model_attributes_type"):
        tables = _tables_at(_without_indices(path))
        keys = f" of {', '.join(sorted(tables[0].model_fields))}" if len(tables) == 1 else ""
        return f"{value!r}: must be a table{keys}"
    if item["type"] == "tuple_type":
        return (
            f"{value!r}: must be a list, such as [{value if isinstance(value, str | int | float) else '...'}]"
        )
    if item["type"] in ("float_type", "int_type") and isinstance(value, str) and _is_number(value):
        return f"{value!r} is a text; write the number without quotes"
    return f"{value!r}: {message}"


def _name(value: Any) -> str:
    """What names a table: a text, or the type of one. Empty: nothing does."""
    value = value.get("type") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _with_recipe(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with the options of its recipe, in which a mistake may lie too."""
    algorithm = tree.get("algorithm")
    table = {"type": algorithm} if isinstance(algorithm, str) else algorithm
    if not isinstance(table, dict) or not isinstance(name := table.get("type"), str):
        return tree
    try:
        return {**tree, "algorithm": merged(find_recipe(name).options, table)}
    except ValueError:  # there is none: that is the mistake
        return tree


def _names_key(path: str, message: str) -> bool:
    """Whether what a table refuses begins with one of its keys."""
    key, separator, _ = message.partition(": ")
    return bool(separator) and f"{_without_indices(path)}.{key}" in set(all_keys(Config))


def _is_inside(location: tuple[int | str, ...], table: tuple[int | str, ...]) -> bool:
    return len(location) > len(table) and location[: len(table)] == table


def _meaning(path: str) -> str:
    """The documentation of the key; empty for one inside a free table."""
    parent, _, key = _without_indices(path).rpartition(".")
    fields = [table.model_fields[key] for table in _tables_at(parent) if key in table.model_fields]
    sentence = fields[0].description if fields else None
    return f" ({' '.join(sentence.split())})" if sentence else ""


def _tables_at(path: str) -> list[type[BaseModel]]:
    """The tables that may stand at `path`: several of a union, none where no table does."""
    tables: list[type[BaseModel]] = [Config]
    for key in path.split(".") if path else ():
        annotations = [table.model_fields[key].annotation for table in tables if key in table.model_fields]
        tables = [nested for annotation in annotations for nested in nested_tables(annotation)]
    return list(dict.fromkeys(tables))


def _type_of(table: type[BaseModel]) -> str:
    """By which a union tells the table from others; empty where it has none."""
    return str(table.model_fields["type"].default) if "type" in table.model_fields else ""


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


def _kind(location: tuple[int | str, ...], path: str) -> str:
    """The type of the table that an unknown key stands in, where the table is one of a union; else empty."""
    parent = _without_indices(path).rpartition(".")[0]
    tag = location[-2] if len(location) > 1 else ""
    return str(tag) if tag and tag in [_type_of(table) for table in _tables_at(parent)] else ""


def _unknown(path: str, value: Any) -> Iterator[str]:
    """The key itself; of a table that has names here, such as verl's `trainer`, every key in it."""
    inside = {f"{path}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {}
    is_answered = path.rpartition(".")[2] in ABSENT or _nearest(path)
    if inside and (not is_answered or any(map(_renamed, inside))):
        for key, item in inside.items():
            yield from _unknown(key, item)
    else:
        yield path


def _renamed(path: str) -> str | None:
    """What another framework's key is called here."""
    parts = _without_indices(path).split(".")
    return next((here for n in (3, 2, 1) if (here := RENAMES.get(".".join(parts[-n:])))), None)


def _advice(path: str, kind: str) -> str:
    """Which types of the table have the key, what it is called here or why it has no counterpart, the nearest of its
    own table, the same word in another one. `kind`: the type of its table, where there are several."""
    key = _without_indices(path)
    parent, _, last = key.rpartition(".")
    if kind and (types := [_type_of(table) for table in _tables_at(parent) if last in table.model_fields]):
        own = ", ".join(_siblings(parent, kind))
        return f" of type {kind}; {', '.join(types)} {'has' if len(types) == 1 else 'have'} it, and {kind} has: {own}"
    last_two = ".".join(key.split(".")[-2:])
    if renamed := _renamed(path):
        return f"; here it is {renamed}"
    if said := ABSENT.get(last_two) or ABSENT.get(last):
        return f"; leave it out: {said}"
    if nearest := _nearest(path, kind):
        return f"; did you mean {nearest}?"
    if kind == "custom":
        return f"; arguments of the function stand in {parent}.options"
    known = sorted(set(all_keys(Config)), key=lambda k: (k.count("."), k))
    elsewhere = [k for k in known if k.endswith(f".{last_two}") or k == last_two]
    elsewhere += [k for k in known if k.rpartition(".")[2] == last]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    if siblings := _siblings(parent, kind):
        of_type = f" of type {kind}" if kind else ""
        return f"; {parent or 'the top level'}{of_type} has: {', '.join(siblings)}"
    return "; no key here resembles it: leave it out, or look into `asyncrl schema`"


def _nearest(path: str, kind: str = "") -> str:
    """The key of the same table that is spelt most like it; empty when none is."""
    parent, _, last = _without_indices(path).rpartition(".")
    near = difflib.get_close_matches(last, _siblings(parent, kind), n=1, cutoff=0.6)
    return ".".join([parent, *near] if parent else near) if near else ""


def _siblings(parent: str, kind: str = "") -> list[str]:
    """The keys of the table `parent`, of one type of it where `kind` says which; empty when there is no such table."""
    tables = [table for table in _tables_at(parent) if not kind or _type_of(table) == kind]
    return sorted({key for table in tables for key in table.model_fields})
