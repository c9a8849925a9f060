"""What `algorithm` names besides built-in parts: functions of the user's own, other models, a reward's label.

Looked at before anything starts.
"""

from __future__ import annotations

from pathlib import Path

from asyncrl.config import Config
from asyncrl.config.advantages import CustomAdvantages
from asyncrl.config.losses import CustomLoss
from asyncrl.envs.dataset import load_tokenizer
from asyncrl.envs.rewards import reward_labels
from asyncrl.errors import ConfigError
from asyncrl.launch.function_check import NamedFunction, check_functions
from asyncrl.launch.model_facts import check_length, check_tensor_parallel, read_tensor_shapes
from asyncrl.models.source import model_folder
from asyncrl.user_code import did_you_mean, names_user_code


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
        NamedFunction("algorithm.stages", name, ["experience", "context"])
        for name in algorithm.stages
        if names_user_code(name)
    ]
    tables = [
        ("algorithm.advantages", "experience", algorithm.advantages),
        ("algorithm.loss.policy", "tokens", algorithm.loss.policy),
    ]
    return stages + [
        NamedFunction(f"{key}.function", table.function, [argument], table.options)
        for key, argument, table in tables
        if isinstance(table, CustomAdvantages | CustomLoss)
    ]


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
    check_tensor_parallel(folder, config.learner.tensor_parallel_size, key)
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
