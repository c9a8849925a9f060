"""From a YAML file and dotted overrides to a Config, or one ConfigError that lists every mistake.

load_config("configs/tiny.yaml", ["learner.lr=1e-4", "max_staleness=1"])
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from asyncrl.config.advantages import advantage_options
from asyncrl.config.loss_presets import policy_options
from asyncrl.config.mistakes import explain
from asyncrl.config.tree import Config
from asyncrl.errors import ConfigError

NAMED_TABLES = {
    "algorithm": lambda name: {"type": name},
    "advantages": advantage_options,
    "policy": policy_options,
}
"""Tables that a name alone may stand for -> the table that it stands for: an override may add a key to it."""


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice, reads 1e-6 as a number, and a date as the text that it is."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"{key}: given twice in the same table; keep one")
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that _Loader would read as numbers."""


# PyYAML follows YAML 1.1, whose floats need a dot: read 1e-6 as YAML 1.2 does.
for _yaml in (_Loader, _Dumper):
    _yaml.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )
# No key is a date, and a run may be named by one.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Reads `path` (None: all defaults), applies `key.path=value` overrides, validates.

    Raises ConfigError naming each key's path, its value, and what would be right.
    """
    tree = _read_yaml(Path(path)) if path is not None else {}
    for position, override in enumerate(overrides):
        _check_order(override, overrides[:position])
        _apply_override(tree, override)
    return validate_config(tree)


def validate_config(tree: dict[str, Any]) -> Config:
    """Raises ConfigError with one line a mistake."""
    try:
        raw = json.dumps(tree, default=_as_plain)
    except TypeError as error:  # a key that is no text
        raise ConfigError(f"the configuration is not plain data: {error}") from error
    try:
        return Config.model_validate_json(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error, tree))) from error


def dump_config(config: Config) -> str:
    """The resolved config as YAML: what the run directory keeps."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


def shared_digest(config: Config) -> str:
    """Hash of what learner and rollout servers must agree on; they compare it when they meet."""
    shared = config.model_dump(mode="json", exclude={"run", "resources", "stream", "timeouts", "launcher"})
    for key in ("num_servers", "kv_cache_gib", "gpu_memory_utilization", "engine_args", "block_size"):
        del shared["rollout"][key]
    return hashlib.blake2b(json.dumps(shared, sort_keys=True).encode(), digest_size=8).hexdigest()


def _as_plain(value: Any) -> Any:
    """What json cannot carry by itself, from a tree made in Python. Raises ConfigError."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise ConfigError(
        f"the configuration holds {value!r:.200}, a {type(value).__name__}; give plain data: numbers, texts, lists, "
        "tables"
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no text ({error}); name a YAML file") from error
    try:
        tree = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds a {type(tree).__name__}; it must be a table of keys")
    return tree


def _check_order(override: str, earlier: Sequence[str]) -> None:
    """Raises ConfigError for one that would undo an earlier one: `algorithm.critic.lr=1e-5 algorithm=ppo`."""
    path = _path_of(override)
    for other in earlier:
        if _path_of(other).startswith(f"{path}."):
            raise ConfigError(
                f"{override}: replaces the whole of {path}, and {other}, which stands before it, would be lost; write "
                f"{override} first"
            )


def _path_of(override: str) -> str:
    return override.partition("=")[0].strip().removeprefix("--")


def _apply_override(tree: dict[str, Any], override: str) -> None:
    path, (_, separator, text) = _path_of(override), override.partition("=")
    if not separator or not path:
        raise ConfigError(f"{override!r}: not an override; write key.path=value")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {text!r} is not YAML: {error}") from error
    table = tree
    *parents, key = path.split(".")
    for parent in parents:
        child = table.get(parent)
        if parent in NAMED_TABLES and isinstance(child, str):
            child = NAMED_TABLES[parent](child)
        if child is not None and not isinstance(child, dict):
            raise ConfigError(f"{path}: {parent} is {child!r}, not a table")
        table[parent] = dict(child or {})
        table = table[parent]
    table[key] = value
