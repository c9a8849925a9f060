"""From the names of a recipe's stages to the functions that a rank runs once a batch."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.learner.select import select
from asyncrl.learner.stages import (
    Stage,
    advantage,
    correct_batch,
    kl_reward,
    own_stage,
    reference,
    score,
    values,
    whiten,
)
from asyncrl.user_code import names_user_code

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
    return [
        STAGES[name] if name in STAGES else own_stage(name)
        for name in names
        if name in STAGES or names_user_code(name)
    ]
