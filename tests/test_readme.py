"""What the README and the docs name exists, and the configuration they show loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from asyncrl.config import Config, all_keys, load_config, validate_config
from asyncrl.errors import ConfigError

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path):
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path):
    names = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|yaml))`", page.read_text()))
    names -= {"my_rewards.py", "my.yaml", "config.yaml"}  # a user's own, and the run directory's
    folders = [ROOT, ROOT / "asyncrl", ROOT / "configs", *(ROOT / "asyncrl").iterdir()]
    assert [name for name in sorted(names) if not any((folder / name).exists() for folder in folders)] == []


def test_the_readmes_configuration_is_valid_and_its_table_of_renames_names_real_keys():
    text = (ROOT / "README.md").read_text()
    [block] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    validate_config(yaml.safe_load(block))
    keys = set(all_keys(Config))
    renamed = re.findall(r"^\| `[^|]*\| `([a-z_.]+)`", text, re.MULTILINE)
    assert len(renamed) > 5
    assert [key for key in renamed if key not in keys] == []


def test_the_configurations_of_the_data_page_are_valid():
    [block] = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)
    tables = re.split(r"^(?=data:)", block, flags=re.MULTILINE)[1:]
    assert len(tables) == 3
    for table in tables:
        validate_config(yaml.safe_load(table))


def renames() -> list[tuple[str, str]]:
    """(key elsewhere, key here) of the README's table and of docs/migrating.md's command line."""
    table = re.findall(r"^\| (`[^|]*`) \| `([a-z_.]+)`", (ROOT / "README.md").read_text(), re.MULTILINE)
    pairs = [(theirs, ours) for cell, ours in table for theirs in re.findall(r"`([^`]+)`", cell)]
    page = (ROOT / "docs" / "migrating.md").read_text()
    return pairs + re.findall(r"^  ([a-z_.]+)=\S+ +'?([a-z_.]+)=.*$", page, re.MULTILINE)


@pytest.mark.parametrize(("theirs", "ours"), renames())
def test_a_key_in_verls_or_trls_way_is_refused_with_its_name_here(theirs: str, ours: str):
    # Mutations: drop a line of mistakes.NAMES_ELSEWHERE; ask of an unknown table only its own name.
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"{theirs}=1"])
    assert str(caught.value).startswith(f"{theirs}: unknown key; ")
    assert re.search(rf"(here it is|did you mean) {re.escape(ours)}\b", str(caught.value)), caught.value


def test_the_command_line_of_the_migrating_page_was_found():
    assert len(renames()) > 25


def test_every_make_target_of_the_readme_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(named) >= 2
    assert set(named) <= targets
