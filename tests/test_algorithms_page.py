"""docs/algorithms.md names everything that there is, with what it really does; the README shows the same code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from asyncrl.config import AlgorithmConfig, validate_config
from asyncrl.config.advantage_presets import ALGORITHMS
from asyncrl.config.advantages import TABLES, AnyAdvantages
from asyncrl.config.losses import AggregationConfig, KlConfig, LossConfig
from asyncrl.config.recipes import RECIPES, STAGES
from asyncrl.config.shaping import FilterConfig

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "algorithms.md").read_text()


def section(heading: str) -> str:
    """The text between this heading and the next."""
    [found] = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return found


def first_column(text: str) -> list[str]:
    """The names in backticks that rows of tables begin with, headings left out."""
    return re.findall(r"^\| `([\w-]+)`(?!.*\n\|---)", text, re.MULTILINE)


def literals(table: Any, name: str) -> set[str]:
    return set(get_args(table.model_fields[name].annotation))


def test_the_page_has_every_stage_recipe_estimator_loss_and_mode():
    # Mutation: add a name to the code without the page, or the other way around.
    policies = {
        table.model_fields["type"].default for table in get_args(LossConfig.model_fields["policy"].annotation)
    }
    assert set(first_column(section("Stages"))) == set(STAGES)
    assert set(first_column(section("Recipes"))) == set(RECIPES)
    assert set(first_column(section("Advantages"))) == {*ALGORITHMS, *TABLES}
    assert set(first_column(section("Policy losses"))) == (
        policies | literals(AggregationConfig, "mode") | literals(KlConfig, "estimator")
    )
    assert literals(FilterConfig, "keep") <= set(first_column(section("Shaping and filters")))
    assert {table.model_fields["type"].default for table in get_args(AnyAdvantages)} == set(TABLES)


def test_the_pages_recipes_are_what_they_are_said_to_be():
    # Mutations: another clip or lambda of a recipe; a critic for one that the page gives none.
    rows = dict(re.findall(r"^\| `(\w+)` (.*) \|$(?!\n\|---)", section("Recipes"), re.MULTILINE))
    for name, row in rows.items():
        algorithm = AlgorithmConfig.model_validate({"type": name})
        assert algorithm.loss.policy.type in row, name
        mode = algorithm.loss.aggregation.mode
        assert mode in row or mode == "token-mean", name
        assert (algorithm.critic is not None) == ("critic" in row), name
        assert ("shuffle" in algorithm.stages) == ("`shuffle`" in row), name
        assert (algorithm.filter.keep == "spread") == ("filter `spread`" in row), name
        assert (algorithm.shaping.overlong is not None) == ("overlong" in row), name
        assert (algorithm.token_whitening is not None) == ("whitened" in row), name
        assert ("greedy" in str(algorithm.advantages)) == ("greedy" in row), name
    dapo, ppo = (AlgorithmConfig.model_validate({"type": name}) for name in ("dapo", "ppo"))
    assert f"clip_high {dapo.loss.policy.clip_high}" in rows["dapo"]
    assert f"lambda {ppo.advantages.lam}" in rows["ppo"]


@pytest.mark.parametrize(
    "block", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL), ids=lambda text: text[:24]
)
def test_the_pages_configurations_are_valid(block: str):
    validate_config(yaml.safe_load(block))


def test_the_pages_options_are_valid():
    # Mutation: an option of the tables of shaping and correction that the configuration refuses.
    found = 0
    for heading, key in (("Shaping and filters", "shaping"), ("Correction", "correction")):
        for option in re.findall(r"^\| `(\w+: .*?)` \|", section(heading), re.MULTILINE):
            if re.search(r": [fb]\b", option):  # a letter in place of a number
                option = re.sub(r": [fb]\b", ": 1", option)
            table = yaml.safe_load(option.replace("buffer_tokens: 1", "buffer_tokens: 8"))
            if option == "proximal: bypass":
                table["weight"] = None
            AlgorithmConfig.model_validate({key: table})
            found += 1
    assert found == 12


def test_the_readme_shows_the_pages_code_and_numbers():
    # Mutation: change one of the two.
    readme = (ROOT / "README.md").read_text()
    [own] = re.findall(r"```python\n# my_algorithm.py\n(.*?)```", readme, re.DOTALL)
    assert own in PAGE
    assert len(own.splitlines()) <= 20
    covered, total = re.findall(r"(\d+) of (\d+) are equal", PAGE)[0]
    assert f"{int(covered):,} of\n{int(total):,} recorded calls" in readme
    for name in RECIPES:
        assert f"`{name}`" in readme
