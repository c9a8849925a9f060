"""Recorded numbers of well-known peers, as flat tokens: what the golden tests are compared with.

The files come from the folder `ASYNCRL_GOLDENS`; by default they are the copies in tests/data. A case is one call of
a peer's own function: `inputs`, `params` under the peer's names, `outputs`.
"""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms.segments import Segments

COPIES = Path(__file__).parent.parent / "data"
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}


@dataclass(frozen=True)
class Golden:
    """One recorded call. `topic` is the file's: golden_<topic>.json."""

    topic: str
    id: str
    peer: str
    """As presets name it."""
    function: str
    dtype: torch.dtype
    inputs: dict[str, Any]
    params: dict[str, Any]
    outputs: dict[str, Any]
    note: str

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """An input as a tensor of the case's dtype, in the recorded shape."""
        return as_tensor(self.inputs[name], dtype or self.dtype)

    def output(self, name: str) -> Tensor:
        return as_tensor(self.outputs[name], self.dtype)

    @property
    def preset(self) -> str:
        """What options call the peer."""
        return "nemo" if self.peer == "nemo_rl" else self.peer

    @property
    def mask(self) -> Tensor:
        """[B, T] bool: the tokens that train."""
        return self.tensor("mask").bool()

    @property
    def segments(self) -> Segments:
        return Segments.of_counts(self.mask.sum(1))

    def flat(self, name: str) -> Tensor:
        """An input [B, T] -> its trained tokens [N]; what stands at mask 0 is left behind."""
        return self.tensor(name)[self.mask]


def as_tensor(value: Any, dtype: torch.dtype) -> Tensor:
    """Nested lists, in which "NaN", "Infinity" and "-Infinity" are strings."""
    return torch.tensor(_numbers(value), dtype=dtype)


def _numbers(value: Any) -> Any:
    return [_numbers(item) for item in value] if isinstance(value, list) else float(value)


@cache
def load_goldens(topic: str) -> tuple[Golden, ...]:
    folder = Path(os.environ.get("ASYNCRL_GOLDENS", COPIES))
    plain = folder / f"golden_{topic}.json"
    text = (
        plain.read_bytes() if plain.exists() else gzip.decompress((folder / f"{plain.name}.gz").read_bytes())
    )
    return tuple(
        Golden(
            topic=topic,
            dtype=torch.float32 if case["dtype"] == "float32" else torch.float64,
            peer="nemo" if case["peer"] == "nemo_rl" else case["peer"],
            **{key: case[key] for key in ("id", "function", "inputs", "params", "outputs")},
            note=case["note"] or "",
        )
        for case in json.loads(text)
    )


def assert_equal(case: Golden, name: str, found: Tensor, expected: Tensor) -> None:
    """Equal to the tolerance of the case's dtype, relative above 1; NaN and inf equal themselves."""
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(
        found.detach().to(case.dtype),
        expected,
        rtol=tolerance,
        atol=tolerance,
        equal_nan=True,
        msg=lambda text: f"{case.id}: {name}: {text}",
    )


class LeftOut(Exception):
    """A recorded case that asyncrl does not reproduce on purpose; the message is the reason."""
