"""What the tests of recipes share."""

from __future__ import annotations

from pathlib import Path

import pytest
from flow_cases import near_groups, random_head, write_models
from recipe_cases import Flow

from asyncrl.learner import critic, model


@pytest.fixture
def flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Flow:
    """A batch and its models, with value heads that have an opinion."""
    for module in (critic, model):
        monkeypatch.setattr(module, "make_value_head", random_head)
    model_path = write_models(tmp_path)
    return Flow(tmp_path, model_path, near_groups(model_path))
