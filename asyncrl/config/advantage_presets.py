"""Named advantages: what published algorithms are as options, and what peers do differently from each other.

Read at the commits of the recorded numbers that the tests replay. A preset says what the peer computes, not what is
best: where a peer has a fault (a division by 0 in a group of one), the preset keeps our 0.
"""

from __future__ import annotations

from typing import Any, Literal

Peer = Literal[
    "verl",
    "trl",
    "trl_async",
    "openrlhf",
    "nemo",
    "skyrl",
    "open_instruct",
    "torchrl",
    "areal",
    "roll",
    "slime",
    "prime_rl",
    "megatron_rl",
    "deepspeed_chat",
]

Options = dict[str, Any]

ALGORITHMS: dict[str, Options] = {
    "grpo": {"type": "outcome"},
    "dr_grpo": {"type": "outcome", "scale": "none"},
    "rloo": {"type": "outcome", "baseline": "leave_one_out", "scale": "none"},
    "opo": {"type": "outcome", "baseline": "length_weighted", "scale": "none"},
    "gpg": {"type": "outcome", "scale": "nonzero_share", "scale_over": "batch", "epsilon": 0.0},
    "maxrl": {"type": "outcome", "scale": "mean"},
    "remax": {"type": "outcome", "baseline": "greedy", "scale": "none"},
    "reinforce": {"type": "outcome", "baseline": "none", "scale": "none"},
    "reinforce_plus_plus": {"type": "outcome", "baseline": "none", "scale": "none", "whiten": {}},
    "reinforce_plus_plus_baseline": {"type": "outcome", "baseline": "mean", "scale": "none", "whiten": {}},
}
"""Algorithm -> the options that make it, of a table's."""

POPULATION_FLOOR: Options = {"deviation": "population", "epsilon_in": "variance_floor"}

PEERS: dict[str, dict[str, Options]] = {
    "verl": {
        "outcome": {"group_of_one": "reward", "kl_credit": "trajectory"},
        "remax": {"kl_credit": "to_go"},
        "reinforce_plus_plus": {"kl_credit": "to_go"},
        "gdpo": {"group_of_one": "reward"},
        "otb": {"zero_tail": True},
    },
    "skyrl": {
        "outcome": {"group_of_one": "reward", "gaps": "cut", "kl_credit": "trajectory"},
        "rloo": {"group_of_one": "zero"},
        "reinforce_plus_plus": {"kl_credit": "to_go"},
    },
    "openrlhf": {
        "outcome": {"epsilon": 1e-9, "gaps": "discount"},
        "reinforce_plus_plus": {"whiten": POPULATION_FLOOR},
        "reinforce_plus_plus_baseline": {"whiten": POPULATION_FLOOR},
        "gae": {"gaps": "discount", "whiten": POPULATION_FLOOR},
    },
    "nemo": {
        "outcome": {
            "baseline": "leave_one_out",
            "deviation": "leave_one_out",
            "epsilon_form": "where_positive",
        },
        "reinforce": {"whiten": POPULATION_FLOOR},
        "reinforce_plus_plus": {"whiten": POPULATION_FLOOR, "kl_credit": "own_token"},
        "reinforce_plus_plus_baseline": {"whiten": POPULATION_FLOOR, "kl_credit": "own_token"},
        "gdpo": {
            "baseline": "leave_one_out",
            "deviation": "leave_one_out",
            "epsilon_form": "where_positive",
            "whiten": {"epsilon": 0.0},
            "whiten_over": "trajectories",
        },
        "gae": {"lam": 0.95},
    },
    "trl": {
        "outcome": {"epsilon": 1e-4, "whiten_over": "trajectories", "kl_credit": "trajectory"},
        "gdpo": {
            "epsilon": 1e-4,
            "whiten": {"epsilon": 1e-4, "epsilon_in": "std"},
            "whiten_over": "trajectories",
        },
        "gae": {"lam": 0.95},
    },
    "trl_async": {"outcome": {"deviation": "population", "epsilon": 1e-8}},
    "open_instruct": {
        "outcome": {"deviation": "population", "epsilon": 1e-8},
        "gae": {"gaps": "cut", "whiten": None},
    },
    "torchrl": {"outcome": {"epsilon_form": "floor"}, "gae": {"whiten": None}},
    "areal": {
        "outcome": {"deviation_around": "baseline", "epsilon": 1e-5},
        "rloo": {"group_of_one": "reward"},
        "gae": {"whiten": None},
    },
    "roll": {"outcome": {}, "gae": {"whiten": None}},
    "slime": {"outcome": {"gaps": "discount"}, "gae": {"whiten": None}},
    "prime_rl": {"outcome": {"scale": "none"}, "maxrl": {"epsilon": 0.0}},
    "megatron_rl": {"outcome": {"deviation": "population", "epsilon": 1e-4}},
    "deepspeed_chat": {"gae": {"lam": 0.95, "whiten": None}},
}
"""Peer -> table or algorithm -> its options where they are not the table's defaults."""


def with_presets(written: Options) -> Options:
    """The options of a table: the peer's for the table, the algorithm's, the peer's for the algorithm, those written.

    A later one wins. An unknown type or preset is left for the table to refuse.
    """
    name = str(written["type"])
    algorithm = ALGORITHMS.get(name, {"type": name})
    peer = PEERS.get(str(written.get("preset")), {})
    of_name = peer.get(name, {}) if name in ALGORITHMS else {}
    return {**peer.get(algorithm["type"], {}), **algorithm, **of_name, **written, "type": algorithm["type"]}
