"""From the names of a recipe's stages to the functions that a rank runs once a batch."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from asyncrl.errors import ConfigError, one_line
from asyncrl.learner.select import select
from asyncrl.learner.stages import (
    Stage,
    advantage,
    correct_batch,
    kl_reward,
    reference,
    score,
    values,
    whiten,
)

STAGES: dict[str, Stage] = {
    "score": score,
    "reference": reference,
    "values": values,
    "kl_reward": kl_reward,
    "advantage": advantage,
    "whiten": whiten,
    "correct": correct_batch,
    "select": select,
}
"""The other stages of a recipe are the coordinator's, or belong to the steps."""


def find_stages(names: Sequence[str]) -> list[Stage]:
    """In their order; `module:attr` is one of the user's own. Raises ConfigError for one that cannot be imported."""
    found: list[Stage] = []
    for name in names:
        if name in STAGES:
            found.append(STAGES[name])
        elif ":" in name:
            found.append(_import(name))
    return found


def _import(name: str) -> Stage:
    module, _, attr = name.partition(":")
    try:
        stage: Stage = getattr(importlib.import_module(module), attr)
    except Exception as error:
        raise ConfigError(f"algorithm.stages: {name!r} cannot be imported: {one_line(error)}") from error
    if not callable(stage):
        raise ConfigError(f"algorithm.stages: {name!r} is a {type(stage).__name__}; name a function")
    return stage
