"""`reward`: what scores a completion."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from asyncrl.config.table import Table


class RewardConfig(Table):
    """One of several rewards; the trajectory's reward is the weighted sum of those that apply to its row."""

    name: str
    """exact_match, gsm8k_strict, gsm8k_flexible, verl_gsm8k_strict, verl_gsm8k_flexible, math_verify,
    `module:attr`, `path/to/file.py` (its `compute_score`) or `path/to/file.py:attr`, or `model:FOLDER` of a
    sequence classifier."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    style: Literal["auto", "asyncrl", "verl", "trl"] = "auto"
    """How the function is called: f(completion, row); verl's f(data_source, solution_str, ground_truth,
    extra_info); TRL's f(prompts, completions, **columns) -> list. `auto` reads the parameters' names."""
    data_source: Annotated[tuple[str, ...], Field(strict=False)] = ()  # behind tables_by_name it is a list
    """Only rows whose `data.source_key` is one of these; empty is every row."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that every call gets besides."""
