"""Reads and checks data set rows, before any model is loaded. Called by dataset.py.

A row is a dict of JSON values. Every check names the file and line, or the generator and row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from asyncrl.config import DataConfig
from asyncrl.envs.user_code import import_function
from asyncrl.errors import DataError, one_line

Located = tuple[str, object]
"""Where a row was found, and the row."""

MAX_DEPTH = 32
"""Deepest nesting of lists and objects in one row."""


def read_jsonl(path: Path) -> Iterator[Located]:
    """Yields each line's JSON value; empty lines are no rows. Raises DataError."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check data.train") from error
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            yield where, json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: not UTF-8 ({error})") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({error}); every line must be one JSON object") from error


def generate_rows(spec: str, seed: int, max_rows: int) -> Iterator[Located]:
    """Yields the first `max_rows` rows of the function `module:attr`. Raises ConfigError, DataError."""
    return from_generator(import_function(spec, "data.train")(seed), spec, max_rows)


def from_generator(rows: Iterable[object], source: str, max_rows: int) -> Iterator[Located]:
    """Yields the first `max_rows` of `rows`; what the generator raises becomes a DataError."""
    index = 0
    try:
        for row in islice(rows, max_rows):
            yield f"{source}, row {index} (from 0)", row
            index += 1
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{source}: the generator failed at row {index} with {one_line(error)}") from error


def check_rows(located: Iterable[Located], data: DataConfig) -> list[dict[str, Any]]:
    """The rows, each a JSON object with a usable prompt. Raises DataError naming row and column."""
    rows: list[dict[str, Any]] = []
    for where, row in located:
        if not isinstance(row, dict):
            raise DataError(f"{where}: a {type(row).__name__}, not an object with columns")
        for column, value in row.items():
            if problem := _json_problem(value) or _json_problem(column):
                raise DataError(f"{where}, column {column!r}: {problem}")
        _check_prompt(row, data.prompt_key, where)
        rows.append(row)
    return rows


def _check_prompt(row: dict[str, Any], key: str, where: str) -> None:
    where = f"{where}, column {key!r}"
    if key not in row:
        raise DataError(f"{where}: missing; the row has {', '.join(sorted(row))}; set data.prompt_key")
    prompt = row[key]
    if isinstance(prompt, str):
        if not prompt:
            raise DataError(f"{where}: an empty prompt")
        return
    if not isinstance(prompt, list):
        raise DataError(
            f"{where}: {'null' if prompt is None else type(prompt).__name__}; a prompt is a string or a "
            "list of messages"
        )
    if not prompt:
        raise DataError(f"{where}: an empty list of messages")
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or not all(
            isinstance(message.get(name), str) for name in ("role", "content")
        ):
            raise DataError(f"{where}: message {number} must be an object with the strings role and content")


def _json_problem(value: object, depth: int = 0) -> str:
    """Why `value` cannot travel as JSON and msgpack; empty when it can."""
    if depth > MAX_DEPTH:
        return f"nested deeper than {MAX_DEPTH}"
    match value:
        case None | bool():
            return ""
        case str():
            return "" if value.isascii() or _is_unicode(value) else "a string with lone surrogates"
        case int():
            return "" if -(2**63) <= value < 2**64 else "an integer of more than 64 bits"
        case float():
            return "" if math.isfinite(value) else f"{value} is not a finite number"
        case list():
            return next((p for p in (_json_problem(item, depth + 1) for item in value) if p), "")
        case dict():
            if not all(isinstance(key, str) for key in value):
                return "an object whose keys are not all strings"
            items = [*value.keys(), *value.values()]
            return next((p for p in (_json_problem(item, depth + 1) for item in items) if p), "")
    return f"a {type(value).__name__} is not a JSON value"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
