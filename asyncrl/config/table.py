"""What every table of the configuration shares: its strictness, the types of its values, its keys."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from asyncrl.user_code import split_spec

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


def not_built(value: Any, built: tuple[Any, ...]) -> Any:
    """Refuses a documented value whose part does not exist yet."""
    if value not in built:
        choices = ", ".join(repr(choice) for choice in built)
        raise ValueError(f"{value!r} is not built yet; use {choices}")
    return value


def names_a_function(value: str) -> str:
    """Refuses what cannot be a function of the user's own."""
    if not all(split_spec(value)):
        raise ValueError(f"{value!r} names no function; write module:NAME, or path/to/file.py:NAME")
    return value


class Table(BaseModel):
    """A table of the tree: frozen; unknown keys, NaN and Inf are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def tables_by_name(value: Any, key: str) -> Any:
    """A list of tables from what may be written for short: one name, a list of names and tables, or nothing."""
    if value is None:
        return ()
    items = value if isinstance(value, list | tuple) else [value]
    return tuple({key: item} if isinstance(item, str) else item for item in items)


def all_keys(table: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted path of every key in the tree."""
    for name, field in table.model_fields.items():
        yield prefix + name
        for nested in nested_tables(field.annotation):
            yield from all_keys(nested, f"{prefix}{name}.")


def nested_tables(annotation: Any) -> Iterator[type[BaseModel]]:
    """The tables that a field of this type may hold: several for a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        for argument in typing.get_args(annotation):
            yield from nested_tables(argument)
