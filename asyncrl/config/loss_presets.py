"""What each peer means by a loss: options that differ from ours, by peer and by type of policy loss.

Read from their numbers (tests/algorithms/golden_policy_loss.py holds them). `any` applies to every type of a peer.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from asyncrl.user_code import names_user_code

Peer = Literal[
    "areal",
    "deepspeed_chat",
    "megatron_rl",
    "nemo",
    "open_instruct",
    "openrlhf",
    "prime_rl",
    "roll",
    "skyrl",
    "slime",
    "torchrl",
    "trl",
    "trl_async",
    "verl",
]
PEERS = get_args(Peer)

Options = dict[str, Any]

UNBOUNDED: Options = {"max_log_ratio": None}
PER_ROW: Options = {"mode": "seq-mean-token-mean"}
PER_TRAINED_ROW: Options = {
    "mode": "seq-mean-token-mean",
    "divide_by": "trained_trajectories",
    "at_least": 0.0,
}

LOSS_PRESETS: dict[str, dict[str, Options]] = {
    "verl": {
        "any": {
            "aggregation": {"at_least": 0.0},
            "kl": {"estimator": "k3", "clamp_log_ratio": 20.0, "clamp_estimate": 10.0},
        },
        "ppo": {"policy": {"dual_clip": 3.0}},
        "gspo": {
            "policy": {"ratio": "sequence_token", "max_log_ratio": 10.0},
            "aggregation": PER_TRAINED_ROW,
        },
        "gmpo": {"aggregation": {**PER_ROW, "at_least": 0.0}},
        "cispo": {"policy": {"ratio_min": 0.8, "ratio_max": 1.2}},
        "sapo": {"aggregation": PER_TRAINED_ROW},
        "dppo": {"policy": {"max_ratio": 20.0, "score_function": True}},
        "clip_cov": {"policy": UNBOUNDED},
        "kl_cov": {"policy": UNBOUNDED | {"coef": 0.1}},
    },
    "skyrl": {
        "any": {"kl": {"estimator": "k3", "clamp_log_ratio": 20.0, "clamp_estimate": 10.0}},
        "gspo": {"policy": {"ratio": "sequence_token", "max_log_ratio": 10.0}, "aggregation": PER_ROW},
        "sapo": {"aggregation": PER_ROW},
        "cispo": {"policy": {"ratio_min": 0.0, "ratio_max": 5.0}},
        "dppo": {"policy": {"anchor": "rollout"}},
        "clip_cov": {"policy": UNBOUNDED},
        "kl_cov": {"policy": UNBOUNDED | {"share": 0.2, "coef": 1.0}},
        "importance_weighted": {"policy": UNBOUNDED},
        "cross_entropy": {"aggregation": {"mode": "token-sum"}},
    },
    "openrlhf": {
        "any": {"aggregation": {"at_least": 0.0}, "kl": {"clamp_estimate": 10.0}, "ptx": {"coef": 0.05}},
        "gspo": {"policy": UNBOUNDED, "aggregation": PER_TRAINED_ROW},
    },
    "nemo": {
        "any": {
            "kl": {"clamp_log_ratio": 20.0, "clamp_estimate": 10.0, "weight": "score_function", "coef": 0.01}
        },
        "ppo": {"policy": UNBOUNDED},
        "gspo": {"policy": UNBOUNDED, "aggregation": PER_ROW},
        "cispo": {"policy": UNBOUNDED | {"ratio_min": 0.8, "ratio_max": 1.2}},
    },
    "trl": {
        "any": {"kl": {"estimator": "k3"}},
        "ppo": {"policy": UNBOUNDED},
        "gspo": {"policy": UNBOUNDED, "aggregation": PER_ROW},
        "cispo": {"policy": UNBOUNDED | {"ratio_max": 5.0}},
        "sapo": {"policy": UNBOUNDED, "aggregation": PER_ROW},
        "gmpo": {"aggregation": PER_ROW},
    },
    "trl_async": {"ppo": {"policy": UNBOUNDED | {"anchor": "rollout"}}},
    "open_instruct": {
        "any": {"kl": {"estimator": "k3", "clamp_log_ratio": 40.0, "coef": 0.05}},
        "ppo": {"policy": UNBOUNDED | {"clip_high": 0.272}},
        "cispo": {"policy": UNBOUNDED | {"ratio_max": 1.272}},
    },
    "areal": {
        "ppo": {"policy": UNBOUNDED},
        "gspo": {"policy": UNBOUNDED | {"mean_advantages": True}},
        "sapo": {"policy": UNBOUNDED},
    },
    "slime": {
        "any": {"kl": {"estimator": "k3", "clamp_estimate": 10.0}},
        "ppo": {"policy": UNBOUNDED},
        "gspo": {"policy": UNBOUNDED},
        "cispo": {"policy": UNBOUNDED | {"ratio_min": 0.8, "ratio_max": 1.2}},
    },
    "roll": {"any": {"kl": {"estimator": "k3", "clamp_estimate": 10.0}}},
    "prime_rl": {
        "any": {"kl": {"reference": "rollout", "estimator": "k2", "coef": 0.002}},
        "dppo": {"policy": UNBOUNDED | {"anchor": "rollout"}},
        "ipo": {"policy": UNBOUNDED | {"anchor": "rollout"}},
    },
    "megatron_rl": {
        "any": {"kl": {"estimator": "k3"}, "entropy": {"estimate": "sampled"}},
        "ppo": {"policy": UNBOUNDED | {"clip_low": 0.01, "clip_high": 0.01}},
    },
    "torchrl": {"any": {"kl": {"estimator": "k3"}}, "ppo": {"policy": UNBOUNDED}},
    "deepspeed_chat": {"ppo": {"policy": UNBOUNDED}},
}

ValuePeer = Literal["areal", "deepspeed_chat", "nemo", "openrlhf", "skyrl", "trl", "verl"]
VALUE_PEERS = get_args(ValuePeer)
"""Those with a critic."""

VALUE_PRESETS: dict[str, Options] = {
    "verl": {"clip": 0.5, "aggregation": {"at_least": 0.0}},
    "openrlhf": {"clip": 0.5, "aggregation": {"at_least": 0.0}},
    "nemo": {"clip": None},
    "skyrl": {"clip": 0.2, "aggregation": PER_ROW},
    "areal": {"clip": 0.2},
    "trl": {"clip": 0.2},
    "deepspeed_chat": {"clip": 0.2},
}


def policy_options(policy: Any) -> Any:
    """The options of a policy loss that is named for short, or has no type."""
    if isinstance(policy, str):
        return {"type": "custom", "function": policy} if names_user_code(policy) else {"type": policy}
    return {"type": "ppo", **policy} if isinstance(policy, dict) else policy


def with_preset(options: Options) -> Options:
    """The options of a LossConfig on top of its preset's. What needs more than options (a KL a reference model, ptx a
    data set) is added only where the options have a table of it."""
    policy = policy_options(options.get("policy", {}))
    if not isinstance(options.get("preset"), str) or not isinstance(policy, dict):
        return options
    presets = LOSS_PRESETS.get(options["preset"], {})
    merged = _layered(presets.get("any", {}), presets.get(policy["type"], {}), options | {"policy": policy})
    for name in ("kl", "ptx"):
        if options.get(name) is None:
            merged.pop(name, None)
    return merged


def with_value_preset(options: Options) -> Options:
    """The options of a ValueLossConfig on top of its preset's."""
    return _layered(VALUE_PRESETS.get(str(options.get("preset")), {}), options)


def _layered(*layers: Options) -> Options:
    """Later ones win, table by table and key by key."""
    merged: Options = {}
    for layer in layers:
        for name, value in layer.items():
            both = isinstance(value, dict) and isinstance(merged.get(name), dict)
            merged[name] = {**merged[name], **value} if both else value
    return merged
