"""What is said of each mistake in a configuration: the key as the user wrote it, its value, what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from asyncrl.config.table import all_keys, nested_tables
from asyncrl.config.tree import Config

NAMES_ELSEWHERE = {
    "train_batch_size": "learner.prompts_per_batch",
    "train_files": "data.train",
    "val_files": "data.eval",
    "reward_fn_key": "data.source_key",
    "model.path": "model",
    "n": "rollout.group_size",
    "val_kwargs.n": "eval.num_samples",
    "num_generations": "rollout.group_size",
    "max_response_length": "rollout.max_completion_tokens",
    "max_completion_length": "rollout.max_completion_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "total_training_steps": "learner.max_versions",
    "max_steps": "learner.max_versions",
    "ppo_mini_batch_size": "learner.minibatches, their number",
    "ppo_epochs": "learner.epochs",
    "num_iterations": "learner.epochs",
    "ppo_max_token_len_per_gpu": "learner.max_tokens_per_microbatch",
    "learning_rate": "learner.lr",
    "clip_ratio_high": "algorithm.clip_high",
    "epsilon_high": "algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "epsilon": "algorithm.clip_low",
    "scale_rewards": "algorithm.scale",
    "staleness_threshold": "max_staleness",
    "max_off_policy_steps": "max_staleness",
    "test_freq": "eval.every",
    "eval_steps": "eval.every",
    "save_freq": "checkpoint.every",
    "logger": "run.trackers",
    "report_to": "run.trackers",
    "experiment_name": "run.name",
    "custom_reward_function.path": "reward, which takes its path",
    "reward_funcs": "reward",
    "reward_weights": "reward, a list of tables {name: ..., weight: ...}",
}
"""What verl, TRL and AReaL call a key: its name, or the end of its path where the name alone says too little."""


def explain(error: ValidationError, tree: dict[str, Any]) -> Iterator[str]:
    """One line a mistake: key, value, what is wrong, and what the key means where pydantic only names a type."""
    for item in error.errors():
        path = _key_path(item["loc"], tree)
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            yield from _unknown(path, item["input"])
        elif not path:
            yield message
        elif item["type"] == "value_error":
            value = "" if message.startswith(repr(item["input"])) else f"{item['input']!r}: "
            yield f"{path}: {value}{message}"
        else:
            yield f"{path}: {item['input']!r}: {message}{_meaning(path)}"


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
    """An unknown key, or each key of an unknown table: another system's tables have keys with names here."""
    if name := _renamed(path) or _misspelt(path):
        yield f"{path}: unknown key; {name}"
    elif isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _unknown(f"{path}.{key}", inner)
    else:
        yield f"{path}: unknown key; {_moved(path) or _known_keys(path)}"


def _renamed(path: str) -> str:
    """What the key of another system is called here; empty when it is none."""
    names = path.split(".")
    ends = (".".join(names[start:]) for start in range(len(names)))
    return next((f"here it is {NAMES_ELSEWHERE[end]}" for end in ends if end in NAMES_ELSEWHERE), "")


def _misspelt(path: str) -> str:
    """The nearest key of the same table, if one is near."""
    parent, _, key = _without_indices(path).rpartition(".")
    near = difflib.get_close_matches(key, _children(parent), n=1, cutoff=0.6)
    return f"did you mean {parent + '.' if parent else ''}{near[0]}?" if near else ""


def _moved(path: str) -> str:
    """The same word in another table, if there is one; of several the one whose table has the same name too."""
    word = path.rpartition(".")[2]
    keys = [key for key in sorted(set(all_keys(Config))) if key.rpartition(".")[2] == word]
    closest = [key for key in keys if path.endswith(f".{key}")] or keys
    return f"did you mean {closest[0]}?" if closest else ""


def _known_keys(path: str) -> str:
    """What the innermost table that there is holds."""
    table = _without_indices(path)
    while table and not _children(table):
        table = table.rpartition(".")[0]
    return f"{table or 'the top level'} has: {', '.join(_children(table))}"


def _children(table: str) -> list[str]:
    """Names of the keys of a table; empty for one that there is not."""
    keys = (key.rpartition(".") for key in sorted(set(all_keys(Config))))
    return [name for parent, _, name in keys if parent == table]
