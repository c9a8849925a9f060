"""One row of a data set: its values as plain JSON, its columns by dotted path, its prompt and its answer.

Torch-free. dataset.py shapes and checks every row with it before anything starts, and again whenever a row is
read; rewards and trajectory files ask it for a row's answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any

import numpy as np

from asyncrl.config import DataConfig
from asyncrl.errors import DataError

MAX_DEPTH = 32
"""Deepest nesting of lists and objects in one row."""
GROUND_TRUTH = "reward_model.ground_truth"
"""Where verl's data sets keep the answer."""


def lookup(row: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; a column whose own name holds the dots comes first. Raises KeyError."""
    if path in row:
        return row[path]
    value: Any = row
    for key in path.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(path)
        value = value[key]
    return value


def source_of(row: Mapping[str, Any], data: DataConfig, default: str = "") -> str:
    """Where the row is from: its column `data.source_key`, or `default` where that is missing or null."""
    try:
        source = lookup(row, data.source_key)
    except KeyError:
        return default
    return default if source is None else str(source)


def answer_of(row: Mapping[str, Any], data: DataConfig) -> Any:
    """What the row's completions are compared with: `data.answer_key`, else verl's ground truth, else None."""
    for path in (data.answer_key, GROUND_TRUTH):
        try:
            answer = lookup(row, path)
        except KeyError:
            continue
        if answer is not None:
            return answer
    return None


def shape_row(raw: object, columns: Mapping[str, str], where: object) -> dict[str, Any]:
    """The row as JSON values, with `columns` (name here -> dotted path in the source) filled in.

    `where` is formatted only when the row is refused. Raises DataError naming row and column.
    """
    if not isinstance(raw, Mapping):
        raise DataError(f"{where}: a {type(raw).__name__}, not an object with columns")
    row: dict[str, Any] = {}
    for column, value in raw.items():
        try:
            row[_json_value(column, 0)] = _json_value(value, 0)
        except ValueError as error:
            raise DataError(f"{where}, column {column!r}: {error}") from error
    mapped = {}
    for name, path in columns.items():
        try:
            mapped[name] = lookup(row, path)
        except KeyError:
            raise DataError(
                f"{where}, column {path!r}: missing; the row has {', '.join(sorted(row))}; "
                f"correct columns.{name} of the source"
            ) from None
    return row | mapped


def check_prompt(row: Mapping[str, Any], key: str, where: object) -> None:
    """Raises DataError unless column `key` is a prompt: a text, or a list of messages."""
    if key not in row:
        raise DataError(
            f"{where}, column {key!r}: missing; the row has {', '.join(sorted(row))}; set data.prompt_key, or "
            "columns.prompt of the source"
        )
    if problem := prompt_problem(row[key]):
        raise DataError(f"{where}, column {key!r}: {problem}")


def prompt_problem(prompt: object) -> str:
    """Why it is no prompt; empty when it is one."""
    if isinstance(prompt, str):
        return "" if prompt else "an empty prompt"
    if not isinstance(prompt, list):
        kind = "null" if prompt is None else type(prompt).__name__
        return f"{kind}; a prompt is a string or a list of messages"
    if not prompt:
        return "an empty list of messages"
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or not all(
            isinstance(message.get(name), str) for name in ("role", "content")
        ):
            return f"message {number} must be an object with the strings role and content"
    return ""


def _json_value(value: object, depth: int) -> Any:
    """`value` as what JSON and msgpack can carry. Raises ValueError saying why it cannot.

    Times become ISO 8601, decimals their digits, bytes their UTF-8 text, arrays lists: no value changes.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    match value:
        case None | bool():
            return value
        case str():
            if not value.isascii():
                _check_unicode(value)
            return value if type(value) is str else str(value)
        case int():
            if not -(2**63) <= value < 2**64:
                raise ValueError("an integer of more than 64 bits")
            return int(value)
        case float():
            if not math.isfinite(value):
                raise ValueError(f"{value} is not a finite number")
            return float(value)
        case list() | tuple():
            return [_json_value(item, depth + 1) for item in value]
        case Mapping():
            if not all(isinstance(key, str) for key in value):
                raise ValueError("an object whose keys are not all strings")
            return {_json_value(key, depth): _json_value(item, depth + 1) for key, item in value.items()}
        case np.ndarray() | np.generic():
            return _json_value(_from_numpy(value), depth + 1)  # a longdouble stays one
        case date() | time():  # a datetime is a date
            return value.isoformat()
        case Decimal():
            return str(value)
        case bytes():
            return _text(value)
    raise ValueError(f"a {type(value).__name__} is not a JSON value")


def _from_numpy(value: Any) -> object:
    """An array or scalar of numpy as Python objects."""
    if value.dtype.kind == "M":  # tolist() makes nanoseconds a bare integer
        return np.datetime_as_string(value).tolist()
    if value.dtype.kind == "m":
        raise ValueError(f"a {value.dtype} is not a JSON value")
    return value.tolist()


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("a string with lone surrogates") from None


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{len(raw)} bytes that are not UTF-8 text") from None
