"""whitening: moments, and what peers make of them."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.advantages import Moments, whiten
from tests.algorithms.advantage_tables import assert_tokens_equal
from tests.algorithms.goldens import Golden, LeftOut, assert_equal

EPSILON = {
    "areal": {"epsilon": 1e-5, "epsilon_in": "std"},
    "openrlhf": {"epsilon_in": "variance_floor"},
    "roll": {"epsilon_in": "variance"},
}
"""Peer -> where its epsilon goes; the others' is ours: the variance + 1e-8."""


def replay(case: Golden) -> None:
    if "raises" in case.outputs:
        raise LeftOut("the peer refuses fewer than two values; ours gives 0")
    name = case.id.split("/")[2]
    if case.id == "roll/whitening/masked_normalize/ragged/f64":
        raise LeftOut("its mean divides by n + 1e-8, which a row of one token divides by 1e-4; ours is 0")
    if name == "nanstd":
        x = case.tensor("x")
        assert_equal(case, "std", Moments.of(x[~x.isnan()]).variance().sqrt(), case.output("std"))
    elif "mean" in case.outputs:
        _mean(case)
    elif "sum" in case.outputs:
        assert_equal(case, "sum", case.segments.sum(case.flat("x")).sum(), case.output("sum"))
    elif "var" in case.outputs:
        variance = Moments.of(case.flat("x")).variance(sample=case.params["unbiased"])
        assert_equal(case, "var", variance, case.output("var"))
    elif "masked_normalize" in name:
        rows = [_whiten(case, row[mask]) for row, mask in zip(case.tensor("x"), case.mask, strict=True)]
        assert_tokens_equal(case, "whitened", torch.cat(rows))
    else:
        assert_tokens_equal(case, "whitened", _whiten(case, case.flat("x")))


def _mean(case: Golden) -> None:
    x, over_rows = case.flat("x"), case.output("mean").dim() == 1
    mean = case.segments.mean(x) if over_rows else Moments.of(x).mean
    expected = case.output("mean")
    if over_rows and expected.isnan().any():
        raise LeftOut("NaN for a trajectory without tokens; ours is 0")
    assert_equal(case, "mean", mean, expected)


def _whiten(case: Golden, values: Tensor) -> Tensor:
    is_population = (
        case.params.get("unbiased", case.params.get("std_unbiased", "dim" not in case.params)) is False
    )
    return whiten(
        values,
        Moments.of(values),
        shift_mean=case.params.get("shift_mean", True),
        deviation="population" if is_population else "sample",
        **EPSILON.get(case.peer, {}),
    )
