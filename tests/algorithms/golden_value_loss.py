"""Value losses of peers: preset, clip, error, aggregation."""

from __future__ import annotations

from typing import Any

from asyncrl.algorithms.losses import Counts, aggregate
from asyncrl.algorithms.losses.values import critic_objective
from asyncrl.config.losses import ValueLossConfig
from tests.algorithms.goldens import Golden, as_tensor, assert_equal
from tests.algorithms.loss_cases import compare_loss, flat_leaf

CLIP = ("value_eps_clip", "cliprange_value", "cliprange", "clip_eps", "value_clip")


def replay(case: Golden) -> None:
    params = case.params
    (clip,) = [params[name] for name in CLIP if name in params]
    error = "huber" if params.get("loss_fn_type") == "huber" else "squared"
    options = {"preset": case.preset, "clip": clip, "error": error, **aggregation(case)}
    values = flat_leaf(case, "values")
    counts = Counts(params["global_valid_toks"], 0, 0, 0) if "global_valid_toks" in params else None
    loss, diagnostics = critic_objective(
        ValueLossConfig.model_validate(options),
        values,
        case.flat("old_values"),
        case.flat("returns"),
        case.segments,
        counts=counts,
    )
    compare_loss(case, loss, {"values": values})
    if case.peer == "skyrl":  # its clip fraction counts rounding: V_old + (V - V_old) against V
        return
    metrics = case.outputs.get("metrics", {})
    fraction = metrics.get("vf_clipfrac", metrics.get("clipfrac"))
    if fraction is not None:
        clipped = diagnostics["vf_clipfrac"].to(case.dtype)
        found = aggregate(clipped, case.segments, mode="token-mean", counts=counts)
        assert_equal(case, "clip fraction", found, as_tensor(fraction, case.dtype))


def aggregation(case: Golden) -> dict[str, Any]:
    """Only what the parameters say; the rest is the preset's."""
    mode = case.params.get("loss_agg_mode")
    if case.params.get("token_level_loss") is False:
        mode = "seq-mean-token-mean"
    if mode is None:
        return {}
    rows = "trained_trajectories" if mode.startswith("seq") else None
    return {"aggregation": {"mode": mode, "divide_by": rows, "length": float(len(case.inputs["mask"][0]))}}
