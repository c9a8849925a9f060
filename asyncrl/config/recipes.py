"""The built-in recipes: which stages a batch goes through, in order, and their options.

Read a recipe downwards. `filter`, `shape` and `shuffle` run in the coordinator, a group at a time or on the plan. All
others run on the learner ranks: those before `loss` once a batch, in this order (learner/stages.py), then `loss`,
`update` and `critic` once a mini-batch (learner/steps.py). A stage whose options ask for nothing (no reference model,
no KL) costs nothing.

Your own: `algorithm: my_module:my_recipe` names a Recipe; `algorithm.stages` takes `my_module:my_stage`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.user_code import did_you_mean, import_attribute, names_user_code

Options = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stage:
    """What a stage reads and leaves behind."""

    does: str
    needs: tuple[str, ...] = ()
    """Stages that must stand before it, where the recipe has them at all or not."""
    after: tuple[str, ...] = ()
    """Stages that must stand before it where the recipe has them: it reads what they leave."""


STAGES: dict[str, Stage] = {
    # the coordinator, as a group arrives
    "filter": Stage("leaves out groups that teach nothing; others take their place"),
    "shape": Stage("rewards of long or unfinished answers"),
    "shuffle": Stage("deals the groups to mini-batches in a random order instead of theirs"),
    # the ranks, once a batch
    "score": Stage("proximal log-probs: of the learner before the batch's first step"),
    "reference": Stage("log-probs of the frozen reference model"),
    "values": Stage("the critic's value of every token"),
    "kl_reward": Stage("subtracts the KL from the rewards", needs=("score", "reference")),
    "advantage": Stage("rewards, and values, to one advantage a token", after=("values", "kl_reward")),
    "whiten": Stage("advantages to mean 0 and deviation 1", needs=("advantage",)),
    "correct": Stage("off-policy correction: weights and rejected tokens", needs=("score", "advantage")),
    "select": Stage("tokens that the loss chooses (kl_cov, top entropy)", needs=("score", "advantage")),
    # the ranks, once a mini-batch
    "loss": Stage("policy loss, KL, entropy, supervised tokens", needs=("score", "advantage")),
    "critic": Stage("value loss, and the critic's step", needs=("values", "advantage")),
    "update": Stage("the optimizer's step", needs=("loss",)),
}

BY_REWARD = (
    "filter",
    "shape",
    "score",
    "reference",
    "kl_reward",
    "advantage",
    "whiten",
    "correct",
    "select",
    "loss",
    "update",
)
"""Rewards against rewards: the stages of every recipe without a critic."""
BY_CRITIC = (
    "filter",
    "shape",
    "shuffle",
    "score",
    "reference",
    "values",
    "kl_reward",
    "advantage",
    "whiten",
    "correct",
    "select",
    "loss",
    "update",
    "critic",
)
"""Rewards against a value model."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Stages, and options of the table `algorithm` that a user's own win over."""

    stages: tuple[str, ...] = BY_REWARD
    options: Options = field(default_factory=dict)


RECIPES: dict[str, Recipe] = {
    # Group-relative policy optimization, arXiv:2402.03300
    "grpo": Recipe(),
    # No division by the deviation, a constant instead of each length: arXiv:2503.20783
    "dr_grpo": Recipe(
        options={
            "advantages": {"type": "dr_grpo"},
            "loss": {"aggregation": {"mode": "seq-mean-token-sum-norm"}},
        }
    ),
    # Clip-higher, dynamic sampling, overlong penalty, token mean: arXiv:2503.14476
    "dapo": Recipe(
        options={
            "filter": {"keep": "spread"},
            "shaping": {"overlong": {}},
            "loss": {"policy": {"type": "ppo", "clip_low": 0.2, "clip_high": 0.28}},
        }
    ),
    # REINFORCE leave-one-out, arXiv:2402.14740
    "rloo": Recipe(options={"advantages": {"type": "rloo"}}),
    # REINFORCE++ and its form with the group's mean as baseline, arXiv:2501.03262
    "reinforce_pp": Recipe(options={"advantages": {"type": "reinforce_plus_plus"}}),
    "reinforce_pp_baseline": Recipe(options={"advantages": {"type": "reinforce_plus_plus_baseline"}}),
    # One clipped ratio a trajectory, arXiv:2507.18071
    "gspo": Recipe(
        options={"loss": {"policy": {"type": "gspo"}, "aggregation": {"mode": "seq-mean-token-mean"}}}
    ),
    # Clipped importance weights, no token loses its gradient: arXiv:2506.13585
    "cispo": Recipe(options={"loss": {"policy": {"type": "cispo"}}}),
    # A critic, arXiv:1707.06347; on language models arXiv:2203.02155
    "ppo": Recipe(BY_CRITIC, {"advantages": {"type": "gae", "lam": 0.95}, "critic": {}}),
    # Three policies: clipped against the recomputed one, weighted against the sampler: arXiv:2505.24298
    "decoupled_ppo": Recipe(
        options={"advantages": {"type": "grpo", "whiten": {}}, "correction": {"preset": "areal"}}
    ),
    # The reward of a greedy answer is the baseline, arXiv:2310.10505
    "remax": Recipe(options={"advantages": {"type": "remax"}}),
}


def find_recipe(name: str) -> Recipe:
    """By name, or `module:attr`. Raises ValueError with the nearest name, or why it cannot be imported."""
    if name in RECIPES:
        return RECIPES[name]
    if not names_user_code(name):
        raise ValueError(
            f"{name!r} is no recipe{did_you_mean(name, RECIPES)}; there are {', '.join(RECIPES)}, and module:attr for "
            "your own"
        )
    found = import_attribute(name, "recipe")
    if not isinstance(found, Recipe):
        raise ValueError(f"{name!r} is a {type(found).__name__}; name a Recipe of asyncrl.config.recipes")
    _check_own(name, found)
    return found


def _check_own(name: str, recipe: Recipe) -> None:
    """Raises ValueError for what no YAML could say of `algorithm`: other processes read it from there."""
    if not isinstance(recipe.stages, tuple | list) or not all(isinstance(s, str) for s in recipe.stages):
        raise ValueError(
            f"{name!r} has the stages {recipe.stages!r}; write a tuple of names, your own as module:attr"
        )
    if not isinstance(recipe.options, dict) or {"type", "stages"} & set(recipe.options):
        raise ValueError(
            f"{name!r} has the options {recipe.options!r}; write a dict of the tables of `algorithm`, without type and "
            "stages"
        )
    try:
        json.dumps(recipe.options)
    except TypeError as error:
        raise ValueError(
            f"{name!r} has options that are no plain data ({error}); name a function as module:attr"
        ) from error


def check_stages(stages: Sequence[str]) -> None:
    """Raises ValueError for a stage that does not exist, stands twice, before one that it builds on, or after the loss
    where it would run before it."""
    for position, name in enumerate(stages):
        if names_user_code(name):
            continue
        if name not in STAGES:
            raise ValueError(
                f"{name!r} is no stage{did_you_mean(name, STAGES)}; there are {', '.join(STAGES)}, and module:attr for "
                "your own"
            )
        if name in stages[:position]:
            raise ValueError(f"stage {name!r} stands twice; leave one out")
        for needed in STAGES[name].needs:
            if needed not in stages[:position]:
                raise ValueError(f"stage {name!r} needs {needed!r} before it; put it there")
        for read in STAGES[name].after:
            if read in stages[position:]:
                raise ValueError(f"stage {name!r} reads what {read!r} leaves and stands before it; swap them")
    for last in ("loss", "update"):
        if last not in stages:
            raise ValueError(f"a recipe needs the stage {last!r}; add it")
    for name in stages[stages.index("loss") :]:
        if name not in ("loss", "critic", "update"):
            raise ValueError(f"stage {name!r} runs once a batch, before 'loss'; put it there")


def merged(below: Options, above: Options) -> Options:
    """`above` over `below`, table by table. What names another type, or is no table, replaces what is below."""
    tree = dict(below)
    for key, value in above.items():
        old = tree.get(key)
        if (
            isinstance(old, dict)
            and isinstance(value, dict)
            and value.get("type", old.get("type")) == old.get("type")
        ):
            tree[key] = merged(old, value)
        else:
            tree[key] = value
    return tree
