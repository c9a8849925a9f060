"""Every key as a page: docs/configuration.md, as `asyncrl schema --markdown` prints it.

The pydantic tree says all of it: types, bounds, defaults, documentation, and what is refused as not built.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from asyncrl.config.tree import Config

HEADER = """\
# Configuration

Every key, as `asyncrl schema --markdown` prints it. A key is set in the file (`learner: {lr: 1.0e-5}`) or on the
command line (`learner.lr=1e-5`). `asyncrl check my.yaml` shows what a configuration amounts to, with `--resolved` every
value. `asyncrl schema` is the same for editors, as JSON schema.
"""
COLUMNS = "| key | type | default | meaning |\n|---|---|---|---|"
Schema = dict[str, Any]

_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_WORDS = {"string": "text", "boolean": "true or false", "object": "table"}


def reference() -> str:
    """The page."""
    schema = Config.model_json_schema()
    lines = [HEADER]
    for name, paths in _tables(schema, schema["$defs"]).items():
        table = schema["$defs"].get(name, schema)
        heading = ", ".join(f"`{path}`" for path in paths) if name else "Top level"
        if tag := table["properties"].get("type", {}).get("const"):
            heading += f" of type `{tag}`"
        lines += [f"## {heading}\n", _one_line(table.get("description", "")) + "\n", COLUMNS]
        for key, own in sorted(table["properties"].items(), key=lambda item: item[0] != "type"):
            if "$ref" not in own or "description" in own:
                lines.append(_row(key, own, table, paths[0]))
        lines.append("")
    return "\n".join(lines)


def _tables(schema: Schema, definitions: Schema) -> dict[str, list[str]]:
    """Name of each table ("" is the top level) -> where it stands, in the order of the tree."""
    found: dict[str, list[str]] = {"": [""]}

    def look_into(table: Schema, path: str) -> None:
        for key, own in table["properties"].items():
            for name in _references(own):
                paths = found.setdefault(name, [])
                if f"{path}{key}" not in paths:
                    paths.append(f"{path}{key}")
                look_into(definitions[name], f"{path}{key}.")

    look_into(schema, "")
    return found


def _references(own: Schema) -> Iterator[str]:
    """Names of the tables that a value of this type may hold."""
    if "$ref" in own:
        yield own["$ref"].rpartition("/")[2]
    for part in [*own.get("anyOf", ()), *own.get("oneOf", ()), *filter(None, [own.get("items")])]:
        yield from _references(part)


def _row(key: str, own: Schema, table: Schema, path: str) -> str:
    dotted = f"{path}.{key}" if path else key
    required = key in table.get("required", ())
    default = "required" if required else f"`{_shown(own.get('default', {}))}`"
    cells = [f"`{key}`", _kind(own, dotted), default, _one_line(own.get("description", ""))]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _kind(own: Schema, path: str) -> str:
    """The type in words, with its bounds, and which values are refused as not built."""
    if "enum" in own:
        refused = [value for value in own["enum"] if not _is_built(path, value)]
        built = _either(value for value in own["enum"] if value not in refused)
        return f"{built} (not built: {', '.join(f'`{value}`' for value in refused)})" if refused else built
    only = "" if _is_built(path, _another(own.get("default"))) else " (only the default is built)"
    return _in_words(own) + only


def _another(default: Any) -> Any:
    """A value to ask with whether anything but the default is built; one of a wrong type is refused as that."""
    match default:
        case bool():
            return not default
        case int() | float():
            return default + 1
        case _:
            return "x"


def _in_words(own: Schema) -> str:
    if "anyOf" in own or "oneOf" in own:
        parts = [*own.get("anyOf", ()), *own.get("oneOf", ())]
        return " or ".join(dict.fromkeys(_in_words(part) for part in parts))
    if "const" in own:
        return f"`{own['const']}`"
    if "enum" in own:
        return _either(own["enum"])
    if "$ref" in own:
        return "table"
    if "prefixItems" in own:
        return f"list of {len(own['prefixItems'])}: {_in_words(own['prefixItems'][0])}"
    if own["type"] == "array":
        return f"list of {_in_words(own['items'])}".replace("list of table", "list of tables")
    bounds = [
        f"{sign} {own[bound]}" for bound, sign in _BOUNDS.items() if bound in own and own[bound] < 2**60
    ]
    kind: str = own["type"]
    return f"{_WORDS.get(kind, kind)} {', '.join(bounds)}".strip()


def _either(values: Any) -> str:
    return " or ".join(f"`{value}`" for value in values)


def _is_built(path: str, value: Any) -> bool:
    tree: Any = value
    for key in reversed(path.split(".")):
        tree = {key: tree}
    try:
        Config.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        return not any("not built yet" in item["msg"] for item in error.errors())
    return True


def _shown(default: Any) -> str:
    """A default as YAML takes it; of a table its type, of a list of tables their names."""
    if isinstance(default, dict) and default:
        return str(default.get("type", "see below"))
    if isinstance(default, list) and default and isinstance(default[0], dict):
        tables: list[dict[str, Any]] = default
        return ", ".join(table.get("path") or table["name"] for table in tables)
    return default if isinstance(default, str) else json.dumps(default)


def _one_line(text: str) -> str:
    return " ".join(text.split())
