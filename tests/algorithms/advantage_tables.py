"""How the golden tests of advantages name our options: by a table, as a user writes it."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter
from torch import Tensor

from asyncrl.algorithms.advantages.estimators import whitened
from asyncrl.algorithms.advantages.whitening import Moments
from asyncrl.config.advantages import AdvantagesConfig
from tests.algorithms.goldens import Golden, assert_equal

_TABLE = TypeAdapter(AdvantagesConfig)


def table(type: str, preset: str | None = None, **options: Any) -> Any:
    return _TABLE.validate_python({"type": type, "preset": preset, **options})


def whitened_alone(config: Any, values: Tensor) -> Tensor:
    """Whitened by its own moments: the recorded calls saw the whole batch."""
    whitening = config.whiten if config.type == "gae" else config.token_whitening
    return whitened(whitening, values, Moments.of(values))


def assert_tokens_equal(case: Golden, name: str, found: Tensor) -> None:
    """found [N] against the recorded [B, T] at the trained tokens."""
    assert_equal(case, name, found, case.output(name)[case.mask])
