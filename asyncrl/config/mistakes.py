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
    "n": "rollout.group_size",
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
}
"""What verl, TRL and AReaL call a key."""


def explain(error: ValidationError, tree: dict[str, Any]) -> Iterator[str]:
    """One line a mistake: key, value, what is wrong, and what the key means where pydantic only names a type."""
    for item in error.errors():
        path = _key_path(item["loc"], tree)
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            yield f"{path}: unknown key{_did_you_mean(path)}"
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


def _did_you_mean(path: str) -> str:
    """What the key is called here, then the nearest of its own table, then the same word in another one."""
    known = sorted(set(all_keys(Config)))
    parent, _, key = _without_indices(path).rpartition(".")
    siblings = [k for k in known if k.rpartition(".")[0] == parent]
    if key in NAMES_ELSEWHERE:
        return f"; here it is {NAMES_ELSEWHERE[key]}"
    near = difflib.get_close_matches(key, [s.rpartition(".")[2] for s in siblings], n=1, cutoff=0.6)
    if near:
        return f"; did you mean {parent + '.' if parent else ''}{near[0]}?"
    elsewhere = [k for k in known if k.rpartition(".")[2] == key]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return f"; {parent or 'the top level'} has: {', '.join(s.rpartition('.')[2] for s in siblings)}"
