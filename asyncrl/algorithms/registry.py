"""Recipes by the name that `algorithm.type` gives them. The learner builds its recipe here."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.algorithms.grpo import Grpo
from asyncrl.algorithms.recipe import Recipe
from asyncrl.config import GrpoConfig

RECIPES: dict[str, Callable[[GrpoConfig], Recipe]] = {"grpo": Grpo}


def build_recipe(config: GrpoConfig) -> Recipe:
    """The recipe that the config table `algorithm` describes."""
    return RECIPES[config.type](config)
