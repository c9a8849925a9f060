"""Aggregations of peers: mode, denominator and global counts."""

from __future__ import annotations

import torch

from asyncrl.algorithms.losses import Counts, aggregate
from tests.algorithms.goldens import Golden, LeftOut, assert_equal
from tests.algorithms.loss_cases import compare_loss, flat_leaf, gradient

MODES = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
    "prompt_mean": "prompt-mean",
}


def replay(case: Golden) -> None:
    values = flat_leaf(case, "loss_mat")
    loss = aggregate(
        values if "weights" not in case.inputs else values * case.segments.spread(case.tensor("weights")),
        case.segments,
        **options(case),
    )
    compare_loss(case, loss, {"loss_mat": values})
    if "scaled" in case.outputs:
        assert_equal(case, "scaled", gradient(values) * values, case.output("scaled")[case.mask])


def options(case: Golden) -> dict:
    params = case.params
    if "nan_outside_mask" in case.id and params["loss_agg_mode"] != "token-sum":
        raise LeftOut("NaN outside the mask leaks into the loss")
    if case.peer == "open_instruct":
        if params["axis"] == 1:
            return {"mode": "seq-mean-token-mean"}
        fixed = params.get("denominator")
        return {"mode": "token-mean"} if fixed is None else {"mode": "token-sum", "divide_by": fixed}
    if case.peer == "skyrl":
        rows = torch.zeros(len(case.inputs["mask"]), dtype=torch.int64)
        for number, (start, end) in enumerate(params["prompt_boundaries"]):
            rows[start:end] = number
        return {"mode": MODES[params["loss_reduction"]], "length": params["max_seq_len"], "group_index": rows}
    if case.peer == "openrlhf":
        mode = "token-mean" if params["token_level_loss"] else "seq-mean-token-mean"
    else:
        mode = params["loss_agg_mode"]
    if case.peer == "roll" and mode == "token-mean" and not case.mask.all():
        raise LeftOut("the token mean reads values outside the mask")
    ranks = params.get("dp_size", 1)
    trajectories = params.get("global_batch_size", params.get("global_valid_samples"))
    counts = None
    if (
        trajectories is not None
    ):  # a rank's share: the peers' gradients are averaged over ranks, ours are summed
        counts = Counts(params["batch_num_tokens"] / ranks, *[trajectories / ranks] * 3)
    divide_by = None
    if mode == "token-sum":
        divide_by = 1.0 / ranks
    elif case.peer == "roll" and mode == "seq-mean-token-sum-norm":
        divide_by = "one"
    elif case.peer != "roll" and mode.startswith("seq"):
        divide_by = "trained_trajectories"
    return {
        "mode": mode,
        "divide_by": divide_by,
        "length": params.get("loss_scale_factor", len(case.inputs["mask"][0])),
        "at_least": 0.0,
        "counts": counts,
    }
