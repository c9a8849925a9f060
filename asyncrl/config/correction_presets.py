"""Named conventions of off-policy correction: what verl's presets and each peer's defaults amount to.

A value is a dict of keys of `OffPolicyCorrection`. verl's names are its own (`RolloutCorrectionConfig`). Those called
`bypass_pg_*` weigh a loss without a ratio (REINFORCE); the other `bypass_*` leave that to the ratio of a PPO loss.
A peer's name alone is what it does by default: `verl` corrects nothing. Of the others that correct nothing by default
(openrlhf, nemo, skyrl, areal, roll, slime) it is what they do once it is switched on, with the bounds that their
configurations start from or suggest.
"""

from __future__ import annotations

from math import log
from typing import Any

_TOKEN_TIS = {"level": "token", "upper": 2.0}
_SEQUENCE_TIS = {"level": "sequence", "upper": 2.0}
_TOKEN_ICEPOP = {"level": "token", "outside": "zero", "lower": 0.5, "upper": 5.0}

# verl's "lo_hi" of a k1 bounds rollout / proximal, so its logarithms bound -log(proximal / rollout).
_GEOMETRIC = {"statistic": "k1", "over": "mean", "lower": log(0.999), "upper": log(1.001)}
_SEQUENCE = {"statistic": "k1", "over": "sum", "lower": log(0.5), "upper": log(2.0)}
_K3 = {"statistic": "k3", "over": "mean", "upper": 0.01}


def _decoupled(weight: dict[str, Any] | None, *rejections: dict[str, Any]) -> dict[str, Any]:
    return {"proximal": "recompute", "weight": weight, "rejections": rejections, "denominator": "kept"}


def _bypass(weight: dict[str, Any] | None, *rejections: dict[str, Any]) -> dict[str, Any]:
    return {"proximal": "bypass", "weight": weight, "rejections": rejections, "denominator": "kept"}


CORRECTION_PRESETS: dict[str, dict[str, Any]] = {
    "disabled": _decoupled(None),
    "decoupled_token_is": _decoupled(_TOKEN_TIS),
    "decoupled_seq_is": _decoupled(_SEQUENCE_TIS),
    "decoupled_token_icepop": _decoupled(_TOKEN_ICEPOP),
    "decoupled_seq_is_rs": _decoupled(_SEQUENCE_TIS, _SEQUENCE),
    "decoupled_geo_rs": _decoupled(None, _GEOMETRIC),
    "decoupled_geo_rs_token_tis": _decoupled(_TOKEN_TIS, _GEOMETRIC),
    "decoupled_geo_rs_seq_tis": _decoupled(_SEQUENCE_TIS, _GEOMETRIC),
    "decoupled_k3_rs": _decoupled(None, _K3),
    "decoupled_k3_rs_token_tis": _decoupled(_TOKEN_TIS, _K3),
    "decoupled_k3_rs_seq_tis": _decoupled(_SEQUENCE_TIS, _K3),
    "bypass_ppo_clip": _bypass(None),
    "bypass_ppo_clip_geo_rs": _bypass(None, _GEOMETRIC),
    "bypass_ppo_clip_k3_rs": _bypass(None, _K3),
    "bypass_pg_is": _bypass(_SEQUENCE_TIS),
    "bypass_pg_token_icepop": _bypass(_TOKEN_ICEPOP),
    "bypass_pg_geo_rs": _bypass(None, _GEOMETRIC),
    "bypass_pg_geo_rs_token_tis": _bypass(_TOKEN_TIS, _GEOMETRIC),
    "bypass_pg_geo_rs_seq_tis": _bypass(_SEQUENCE_TIS, _GEOMETRIC),
    "verl": _decoupled(None),
    "trl": {"weight": {"level": "sequence", "outside": "zero", "upper": 3.0}, "max_log_ratio": None},
    "trl_async": {"proximal": "bypass", "weight": None},
    "openrlhf": {"weight": {"level": "token", "lower": 0.5, "upper": 5.0}},
    "nemo": {"weight": {"level": "token", "upper": None}, "max_log_ratio": None},
    "skyrl": {
        "weight": {"level": "token", "upper": 2.0},
        "rejections": (
            {"statistic": "ratio", "over": "any", "lower": 1e-4, "upper": 100.0},
            {"statistic": "ratio", "over": "mean", "lower": 0.99, "upper": 1.01},
        ),
        "in_order": True,
    },
    "open_instruct": {"weight": {"level": "token", "upper": 2.0}, "max_log_ratio": 10.0},
    "areal": {
        "weight": {"level": "token", "upper": None},
        "rejections": ({"statistic": "ratio", "over": "token", "upper": 5.0},),
        "max_log_ratio": None,
    },
    "m2po": {"weight": None, "rejections": ({"type": "m2po", "threshold": 0.04},)},
    "roll": {"weight": {"level": "token", "upper": 1.2}, "max_log_ratio": None},
    "slime": {"weight": {"level": "token", "upper": 2.0}, "max_log_ratio": None},
    "torchrl": {"proximal": "bypass", "weight": None},
    "prime_rl": {"proximal": "bypass", "weight": None},
    # Off-policy sequence masking; TRL's off_policy_mask_threshold. It has no customary bound.
    "deepseek_v3_2": {
        "weight": None,
        "rejections": (
            {
                "statistic": "k1",
                "over": "mean",
                "upper": 0.05,
                "between": "learner_rollout",
                "only": "negative_advantage",
            },
        ),
    },
}
