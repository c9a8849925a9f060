"""The corrections that peers apply inside their policy loss, as `OffPolicyCorrection`."""

from __future__ import annotations

from math import log
from typing import Any

from tests.algorithms.goldens import Golden

UNCUT: dict[str, Any] = {"max_log_ratio": None}


def correction_options(case: Golden) -> dict[str, Any] | None:
    """None where the case corrects nothing."""
    return PEERS[case.peer](case.params, case) if case.peer in PEERS else None


def _areal(params: dict, case: Golden) -> dict[str, Any] | None:
    if (rejection := params.get("rejection_sampling")) is None:
        return None
    bounds = {"lower": rejection["lower"], "upper": rejection["upper"]}
    if rejection["level"] == "token":
        level, over = "token", "token"
    else:
        level, over = "geometric", rejection["agg"]
    if rejection["action"] == "clamp":
        return {"weight": {"level": level, **bounds}, **UNCUT}
    criterion = {"statistic": "ratio", "over": over, **bounds}
    return {"weight": {"level": level, "upper": None}, "rejections": (criterion,), **UNCUT}


def _megatron_rl(params: dict, case: Golden) -> dict[str, Any] | None:
    if "rollout_log_probs" not in case.inputs:
        return None
    return {"weight": {"upper": params.get("is_truncation_coef")}, **UNCUT}


def _nemo(params: dict, case: Golden) -> dict[str, Any] | None:
    if not params.get("use_importance_sampling_correction"):
        return None
    if params.get("sequence_level_importance_ratios"):
        return {"weight": {"level": "sequence", "upper": None}, **UNCUT}
    bounds = {
        "lower": params.get("truncated_importance_sampling_ratio_min"),
        "upper": params.get("truncated_importance_sampling_ratio"),
    }
    return _by_name(params.get("truncated_importance_sampling_type", "tis"), bounds)


def _openrlhf(params: dict, case: Golden) -> dict[str, Any] | None:
    if not params.get("enable_vllm_is_correction") or params.get("policy_loss_type") == "gspo":
        return None
    lower, upper = params["vllm_is_truncated_threshold"]
    return _by_name(params.get("vllm_is_correction_type", "tis"), {"lower": lower, "upper": upper})


def _by_name(kind: str, bounds: dict[str, Any]) -> dict[str, Any]:
    if kind == "seq-mask-tis":
        criterion = {"statistic": "ratio", "over": "mean", **bounds}
        return {"weight": {"upper": None}, "rejections": (criterion,), **UNCUT}
    return {"weight": {"outside": "zero" if kind == "icepop" else "truncate", **bounds}, **UNCUT}


def _skyrl(params: dict, case: Golden) -> dict[str, Any] | None:
    if (options := params.get("off_policy_correction")) is None:
        return None
    rejections = []
    for over, name in (("any", "outlier_token_is_threshold"), ("token", "token_mask_is_threshold")):
        if f"{name}_low" in options:
            bounds = {"lower": options[f"{name}_low"], "upper": options[f"{name}_high"]}
            rejections.append({"statistic": "ratio", "over": over, **bounds})
    if options.get("sequence_mask_metric") == "product":
        low, high = options.get("product_mask_low", 0.5), options.get("product_mask_high", 2.0)
        rejections.append({"statistic": "ratio", "over": "sum", "lower": low, "upper": high})
    weight = None
    if level := options.get("tis_ratio_type"):
        upper = options.get(f"{level}_tis_ratio_clip_high", {"token": 2.0, "sequence": 5.0}[level])
        weight = {"level": level, "upper": upper}
    return {"weight": weight, "rejections": tuple(rejections), "in_order": True}


def _trl(params: dict, case: Golden) -> dict[str, Any] | None:
    if (threshold := params.get("off_policy_mask_threshold")) is None:
        return None
    criterion = {
        "statistic": "k1",
        "over": "mean",
        "upper": threshold,
        "between": "learner_rollout",
        "only": "negative_advantage",
    }
    return {"weight": None, "rejections": (criterion,), **UNCUT}


def _verl(params: dict, case: Golden) -> dict[str, Any] | None:
    if params["loss_mode"] != "bypass_mode":
        return None
    weight = None
    if (
        params["rollout_is"] and params["loss_type"] == "reinforce"
    ):  # elsewhere the loss's ratio is the weight
        lower, upper = _low_high(params["rollout_is_threshold"])
        outside = "truncate" if lower is None else "zero"
        weight = {"level": params["rollout_is"], "outside": outside, "lower": lower, "upper": upper}
    rejections: tuple[dict[str, Any], ...] = ()
    if params["rollout_rs"]:
        over, _, statistic = params["rollout_rs"].removeprefix("seq_").partition("_")
        lower, upper = _low_high(params["rollout_rs_threshold"])
        if statistic == "k1":
            lower, upper = log(lower or 1 / upper), log(upper)
        rejections = ({"statistic": statistic, "over": over, "lower": lower, "upper": upper},)
    return {"proximal": "bypass", "weight": weight, "rejections": rejections, "denominator": "kept"}


def _low_high(spec: str | float) -> tuple[float | None, float]:
    """ "0.5_2.0" or 2.0"""
    low, _, high = str(spec).rpartition("_")
    return (float(low) if low else None), float(high)


PEERS = {
    "areal": _areal,
    "megatron_rl": _megatron_rl,
    "nemo": _nemo,
    "openrlhf": _openrlhf,
    "skyrl": _skyrl,
    "trl": _trl,
    "verl": _verl,
}
