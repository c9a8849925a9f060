"""Value losses of peers: clip, error, aggregation."""

from __future__ import annotations

from asyncrl.algorithms.losses import Counts, aggregate
from asyncrl.algorithms.losses.values import value_loss
from tests.algorithms.goldens import Golden, as_tensor, assert_equal
from tests.algorithms.loss_cases import compare_loss, flat_leaf

CLIP = ("value_eps_clip", "cliprange_value", "cliprange", "clip_eps", "value_clip")


def replay(case: Golden) -> None:
    values = flat_leaf(case, "values")
    (clip,) = [case.params[name] for name in CLIP if name in case.params]
    error = "huber" if case.params.get("loss_fn_type") == "huber" else "squared"
    token_loss = value_loss(values, case.flat("old_values"), case.flat("returns"), clip=clip, error=error)
    loss = aggregate(token_loss.loss, case.segments, **aggregation(case))
    compare_loss(case, loss, {"values": values})
    if case.peer == "skyrl":  # its clip fraction counts rounding: V_old + (V - V_old) against V
        return
    metrics = case.outputs.get("metrics", {})
    fraction = metrics.get("vf_clipfrac", metrics.get("clipfrac"))
    if fraction is not None:
        clipped = token_loss.diagnostics["vf_clipfrac"].to(case.dtype)
        options = aggregation(case) if case.peer == "nemo_rl" else {"mode": "token-mean"}
        found = aggregate(clipped, case.segments, **options)
        assert_equal(case, "clip fraction", found, as_tensor(fraction, case.dtype))


def aggregation(case: Golden) -> dict:
    params = case.params
    if case.peer == "verl":
        mode = params["loss_agg_mode"]
        rows = "trained_trajectories" if mode.startswith("seq") else None
        return {"mode": mode, "divide_by": rows, "length": len(case.inputs["mask"][0])}
    if case.peer == "openrlhf":
        if params["token_level_loss"]:
            return {"mode": "token-mean"}
        return {"mode": "seq-mean-token-mean", "divide_by": "trained_trajectories"}
    if case.peer == "skyrl":
        return {"mode": "seq-mean-token-mean"}
    if case.peer == "nemo_rl":
        return {"mode": "token-mean", "counts": Counts(params["global_valid_toks"], 0, 0, 0)}
    return {"mode": "token-mean"}
