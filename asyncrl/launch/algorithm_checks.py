"""What `algorithm` names besides built-in parts: functions of the user's own, other models, a reward's label.

Looked at before anything starts. The functions are imported in a process of their own: they may load torch, and
whatever else their modules do, the launcher only hears of it.

`python -m asyncrl.launch.algorithm_checks NAMED...` is that process, NAMED being JSON.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Config
from asyncrl.config.advantages import CustomAdvantages
from asyncrl.config.losses import CustomLoss
from asyncrl.envs.dataset import load_tokenizer
from asyncrl.envs.rewards import reward_labels
from asyncrl.errors import ConfigError
from asyncrl.launch.model_facts import check_length, read_tensor_shapes
from asyncrl.models.source import model_folder
from asyncrl.user_code import did_you_mean, import_function, names_user_code

IMPORT_TIMEOUT_S = 300.0
"""A user's functions must have been imported by then."""


class NamedFunction(msgspec.Struct, frozen=True):
    """A function of the user's own, and how it will be called."""

    key: str
    """Of the configuration."""
    name: str
    """`module:attr` or `path/to/file.py:attr`."""
    num_arguments: int
    """By position."""
    options: dict[str, Any] = {}
    """By name."""


def check_algorithm(config: Config) -> None:
    """Raises ConfigError."""
    check_functions(named_functions(config))
    for key, name in named_models(config).items():
        model_folder(name, key)
    if (label := config.algorithm.filter.metric) is not None:
        labels = reward_labels([reward.name for reward in config.reward])
        if label.partition("/")[0] not in labels:
            raise ConfigError(
                f"algorithm.filter.metric: {label!r} is no reward's label{did_you_mean(label, labels)}; there are "
                f"{', '.join(labels)}"
            )


def named_functions(config: Config) -> list[NamedFunction]:
    """Those that `algorithm` names."""
    algorithm = config.algorithm
    stages = [
        NamedFunction("algorithm.stages", name, 2) for name in algorithm.stages if names_user_code(name)
    ]
    tables = [
        ("algorithm.advantages", algorithm.advantages),
        ("algorithm.loss.policy", algorithm.loss.policy),
    ]
    return stages + [
        NamedFunction(f"{key}.function", table.function, 1, table.options)
        for key, table in tables
        if isinstance(table, CustomAdvantages | CustomLoss)
    ]


def check_functions(functions: list[NamedFunction]) -> None:
    """Raises ConfigError for one that cannot be imported, or called as it will be."""
    if not functions:
        return
    command = [sys.executable, "-m", __name__, msgspec.json.encode(functions).decode()]
    names = ", ".join(function.name for function in functions)
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{names}: not imported within {IMPORT_TIMEOUT_S:g} s; make the import lighter"
        ) from None
    *_, said = done.stdout.splitlines() or [""]
    if said != ALL_WELL:
        raise ConfigError(
            said or f"{names}: the process that imports this ended with exit code {done.returncode}"
        )


def named_models(config: Config) -> dict[str, str]:
    """Key -> name or folder, of the models that a learner rank loads besides the policy."""
    algorithm = config.algorithm
    names: dict[str, str | None] = {}
    if algorithm.needs_reference:
        names["algorithm.reference.model"] = algorithm.reference.model
    if algorithm.critic is not None:
        names["algorithm.critic.model"] = algorithm.critic.model
    return {key: name for key, name in names.items() if name is not None}


def check_named_model(config: Config, key: str, folder: Path, policy: Path, max_tokens: int) -> None:
    """One of `named_models`, once it and the policy are here. Raises ConfigError."""
    check_length(folder, max_tokens, key)
    if load_tokenizer(folder).get_vocab() != load_tokenizer(policy).get_vocab():
        raise ConfigError(
            f"{key}: {folder} has another vocabulary than {policy}, so it cannot read the policy's tokens; name one "
            "with the same tokenizer"
        )
    is_replaced = key == "algorithm.reference.model" and config.algorithm.reference.refresh_every
    if is_replaced and read_tensor_shapes(folder) != read_tensor_shapes(policy):
        raise ConfigError(
            f"algorithm.reference.refresh_every: {folder} has tensors of other shapes than {policy}, so it cannot take "
            "the policy's weights; set refresh_every: 0"
        )


ALL_WELL = "all well"


def _problems(functions: list[NamedFunction]) -> Iterator[str]:
    for function in functions:
        try:
            signature = inspect.signature(import_function(function.name, function.key))
            signature.bind(*[None] * function.num_arguments, **function.options)
        except ConfigError as error:
            yield str(error)
        except TypeError as error:
            yield (
                f"{function.key} {function.name!r} cannot be called with {function.num_arguments} arguments and the "
                f"options {sorted(function.options)}: {error}"
            )
        except ValueError:
            pass  # a built-in without a signature


if __name__ == "__main__":
    print("\n" + next(_problems(msgspec.json.decode(sys.argv[1], type=list[NamedFunction])), ALL_WELL))
