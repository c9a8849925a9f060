"""What a run is, whatever else of its configuration changes: a checkpoint is only taken up by the same."""

from __future__ import annotations

from typing import Any

from asyncrl.config.algorithm import AlgorithmConfig
from asyncrl.config.table import Table
from asyncrl.config.tree import Config


def learner_kind(config: Config) -> dict[str, str]:
    """Key -> its value in words, of what decides which tensors the learner keeps between versions."""
    critic, lora = config.algorithm.critic, config.learner.lora
    targets = "" if lora is None else ", ".join(lora.target_modules)
    return {
        "algorithm.critic": "null" if critic is None else "shared" if critic.shared else "a body of its own",
        "algorithm.reference.refresh_every": "above 0" if config.algorithm.reference.refresh_every else "0",
        "learner.optimizer": config.learner.optimizer,
        "learner.lora": "null" if lora is None else f"rank {lora.rank}, alpha {lora.alpha}, {targets}",
    }


def run_identity(config: Config) -> dict[str, Any]:
    """Key -> value, of what a resumed run must have as before: its model, its algorithm, its data in their order."""
    data = config.data.model_dump(mode="json", exclude={"eval"})
    return {
        "model": config.model,
        "algorithm.type": config.algorithm.type,
        "algorithm.reference.model": config.algorithm.reference.model,
        **learner_kind(config),
        "seed": config.seed,
        **{f"data.{key}": value for key, value in data.items()},
        "rollout.group_size": config.rollout.group_size,
        "learner.prompts_per_batch": config.learner.prompts_per_batch,
    }


def own_options(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """Dotted key -> value, of every option that has one and is not the recipe's own, in the order of the tables."""
    recipe = _leaves(AlgorithmConfig.model_validate({"type": algorithm.type}).model_dump(mode="json"))
    leaves = _leaves(algorithm.model_dump(mode="json"))
    return {key: new for key, new in leaves.items() if new is not None and new != recipe.get(key)}


def changed_keys(before: Table, after: Table) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (value before, value after) of every leaf that differs."""
    old, new = (_leaves(table.model_dump(mode="json")) for table in (before, after))
    return {
        key: (old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    }


def _leaves(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and value:
            found |= _leaves(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
