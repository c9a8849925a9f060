"""Recipes and their options as scenarios: each is trained whole, in pieces, and on two ranks, to the same weights.

flow_program.py runs all of them on one rank (test_flow.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import numpy as np
import torch
from learner_cases import plain_model, uneven_groups, write_model
from plain_loop import plain_batch
from torch import nn

from asyncrl.algorithms.losses.policy import LossTokens
from asyncrl.config import Config
from asyncrl.config.recipes import RECIPES
from asyncrl.learner import critic, model
from asyncrl.learner.experience import Experience
from asyncrl.learner.update import PolicyLearner
from asyncrl.models.tiny import build_tokenizer
from asyncrl.types import Plan, Shard, TrajectoryGroup

INDEX = 4
"""The batch that the scenarios train: their tokens are of versions 2 to 4."""
HALVES: dict[str, list[list[list[list[int]]]]] = {
    "whole": [[[[0, 2, 4]]], [[[1, 3]]]],
    "pieces": [[[[4], [], [2, 0]]], [[[3], [1]]]],
    "backward": [[[[4, 2, 0]]], [[[3, 1]]]],
    "ranks": [[[[4], [0]], [[2], []]], [[[], []], [[3], [1]]]],
}
"""Split -> [mini-batch][rank][microbatch] -> positions; of two ranks one has nothing of the second half."""
LABELS = ("right", "short")
SUPERVISED = [
    {"prompt": "2+3=", "completion": "5"},
    {"prompt": "abcd", "completion": "dcba"},
    {"text": "the sum of it"},
    {"prompt": "x", "completion": "yzyzyzyzyzyz"},
]


class Scenario(NamedTuple):
    """What is trained."""

    algorithm: dict[str, Any]
    num_greedy: int = 0
    num_epochs: int = 2
    lr: float = 0.05
    max_staleness: int = 2

    def config(self, model_path: Path) -> Config:
        """A reference model, and supervised rows, lie beside the policy's."""
        algorithm = dict(self.algorithm)
        kl = algorithm.get("loss", {}).get("kl", {"reference": ""})
        if "kl_reward" in algorithm or kl.get("reference", "ref") == "ref":
            beside = {"model": str(model_path.with_name("reference"))}
            algorithm["reference"] = beside | algorithm.get("reference", {})
        data = {}
        if algorithm.get("loss", {}).get("ptx", {}).get("coef"):
            data["supervised"] = [{"path": str(model_path.with_name("supervised.jsonl"))}]
        learner = {"optimizer": "sgd", "lr": self.lr, "max_grad_norm": 1e6, "logprob_chunk_tokens": 7}
        return Config.model_validate(
            {
                "algorithm": algorithm,
                "data": data,
                "max_staleness": self.max_staleness,
                "learner": learner | {"minibatches": 2, "epochs": self.num_epochs},
                "rollout": {"temperature": 0.7, "max_completion_tokens": 16},
                "reward": [{"name": "exact_match", "weight": 1.0}, {"name": "exact_match", "weight": -0.5}],
            }
        )


def write_models(folder: Path) -> Path:
    """The policy's with a tokenizer, which is returned, one near it for the reference, and supervised rows."""
    model_path = write_model(folder / "model", "llama", tied=True)
    build_tokenizer().save_pretrained(model_path)
    (folder / "supervised.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUPERVISED))
    reference = plain_model(model_path)
    torch.manual_seed(17)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.03)
    reference.save_pretrained(folder / "reference")
    return model_path


def near_groups(model_path: Path, *, unscored: bool = True) -> list[TrajectoryGroup]:
    """uneven_groups, sampled by policies near the model's: log ratios of about 0.4, versions 2 to 4."""
    groups = uneven_groups()
    rng = np.random.default_rng(5)
    with torch.no_grad():
        logprobs = iter(plain_batch(plain_model(model_path), groups, 0.7).logprobs.tolist())
    for group in groups:
        for t in group.trajectories:
            for j in np.flatnonzero(t.loss_mask):
                t.rollout_logprobs[j] = min(next(logprobs) + 0.4 * rng.normal(), -1e-3)
            t.policy_versions[:] = np.sort(rng.integers(2, 5, len(t)))
            if t.reward is not None:
                t.reward_components = {"right": t.reward, "short": float(rng.normal())}
            if unscored and t.reward is None:  # as the coordinator hands it on
                t.loss_mask = np.zeros_like(t.loss_mask)
    groups[1].trajectories[2].reward_components.pop("short")
    return groups


def with_greedy(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """The last trajectory of each group as its greedy rollout, after the coordinator."""
    for group in groups:
        group.trajectories[-1].loss_mask = np.zeros_like(group.trajectories[-1].loss_mask)
        if group.trajectories[-1].reward is None:
            group.trajectories[-1].reward = 0.5
    return groups


def shard_for(
    scenario: Scenario, groups: list[TrajectoryGroup], minibatches: list[list[list[list[int]]]], rank: int = 0
) -> Shard:
    """As the coordinator makes it."""
    plan = Plan(
        index=INDEX,
        ordinals=[group.ordinal for group in groups],
        rewards=[[t.trained_reward for t in group.trajectories] for group in groups],
        num_trained_tokens=[[int(t.loss_mask.sum()) for t in group.trajectories] for group in groups],
        minibatches=minibatches,
        num_epochs=scenario.num_epochs,
        components={
            label: [[t.reward_components.get(label) for t in group.trajectories] for group in groups]
            for label in LABELS
        },
        num_greedy=scenario.num_greedy,
    )
    plan = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan)
    return Shard(plan, rank, [groups[position] for position in plan.positions_of(rank)])


def random_head(hidden_size: int) -> nn.Linear:
    """A value head that has an opinion, the same wherever it is made."""
    generator = torch.Generator().manual_seed(3)
    head = nn.Linear(hidden_size, 1)
    with torch.no_grad():
        head.weight.copy_(0.1 * torch.randn(1, hidden_size, generator=generator))
        head.bias.fill_(0.2)
    return head


@contextmanager
def random_heads() -> Iterator[None]:
    """In every PolicyLearner that is made meanwhile."""
    with (
        mock.patch.object(model, "make_value_head", random_head),
        mock.patch.object(critic, "make_value_head", random_head),
    ):
        yield


def models_of(learner: PolicyLearner) -> dict[str, nn.Module]:
    """policy with a value head, critic, reference: those that it has."""
    models = learner._models
    found: dict[str, nn.Module] = {"policy": models.policy}
    if models.critic is not None:
        found["critic"] = models.critic.model
    if models.reference is not None:
        found["reference"] = models.reference.model
    return found


def trained_weights(learner: PolicyLearner) -> dict[str, torch.Tensor]:
    """A copy of this rank's shards of all models."""
    return {
        f"{which}.{name}": parameter.to_local().clone()
        for which, module in models_of(learner).items()
        for name, parameter in module.named_parameters()
    }


def policy(**loss: Any) -> dict[str, Any]:
    """GRPO with this policy loss."""
    return {"loss": {"policy": loss}}


AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
)
POLICY_LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {"type": "ppo", "clip_high": 0.28, "dual_clip": 1.5},
    "gspo": {"type": "gspo"},
    "ppo-sequence_token": {"type": "ppo", "ratio": "sequence_token"},
    "ppo-sequence_sum": {"type": "ppo", "ratio": "sequence_sum"},
    "gmpo": {"type": "gmpo", "clip_low": 0.1, "clip_high": 0.1},
    "cispo": {"type": "cispo", "ratio_max": 1.05},
    "sapo": {"type": "sapo"},
    "dppo": {"type": "dppo", "delta_low": 0.01, "delta_high": 0.01},
    "ipo": {"type": "ipo", "threshold": 0.01},
    "clip_cov": {"type": "clip_cov", "share": 0.2, "lowest": -1.0, "highest": 1.5},
    "kl_cov": {"type": "kl_cov", "share": 0.2},
    "reinforce": {"type": "reinforce"},
    "importance_weighted": {"type": "importance_weighted"},
    "dro": {"type": "dro"},
    "vespo": {"type": "vespo"},
    "cross_entropy": {"type": "cross_entropy"},
}
REJECTION = {"statistic": "k3", "over": "mean", "upper": 0.08}


def own_loss(tokens: LossTokens, scale: float) -> torch.Tensor:
    """REINFORCE, `scale` times."""
    return -scale * tokens.advantages * tokens.learner_logprobs


def own_advantages(experience: Experience, shift: float) -> torch.Tensor:
    """The reward minus a constant."""
    return experience.segments.spread(experience.batch.rewards[experience.rows]) - shift


SCENARIOS: dict[str, Scenario] = {
    **{name: Scenario(policy(**table)) for name, table in POLICY_LOSSES.items()},
    **{
        mode: Scenario({"loss": {"aggregation": {"mode": mode}}}, lr=0.001 if mode == "token-sum" else 0.05)
        for mode in AGGREGATIONS
    },
    **{
        f"kept-{mode}": Scenario(
            {
                "loss": {"aggregation": {"mode": mode}},
                "correction": {"rejections": [REJECTION], "denominator": "kept"},
            }
        )
        for mode in AGGREGATIONS
    },
    "kept-by-token": Scenario(
        {
            "correction": {
                "rejections": [
                    {"statistic": "ratio", "lower": 0.7, "upper": 1.4, "between": "learner_rollout"}
                ],
                "denominator": "kept",
            },
            "loss": {"kl": {"reference": "rollout", "coef": 0.1}, "entropy": {"coef": 0.05}},
        }
    ),
    "kept-by-number": Scenario(
        {
            "loss": {"aggregation": {"mode": "seq-mean-token-sum", "divide_by": 5.0}},
            "correction": {"rejections": [REJECTION], "denominator": "kept"},
        }
    ),
    "kept-at-least": Scenario(
        {
            "loss": {"aggregation": {"at_least": 30.0}},
            "correction": {"rejections": [REJECTION], "denominator": "kept"},
        }
    ),
    "bypass": Scenario({"correction": {"proximal": "bypass", "weight": None}}),
    "log_linear": Scenario({"correction": {"proximal": "log_linear"}}),
    "log_linear-m2po": Scenario(
        {"correction": {"proximal": "log_linear", "rejections": [{"type": "m2po", "threshold": 0.02}]}}
    ),
    "log_linear-kl_cov": Scenario(
        {
            "correction": {"proximal": "log_linear"},
            "loss": {"policy": POLICY_LOSSES["kl_cov"]},
        }
    ),
    "m2po": Scenario(
        {
            "correction": {
                "weight": None,
                "rejections": [{"type": "m2po", "threshold": 0.05}],
                "denominator": "kept",
            }
        }
    ),
    "batch_normalize": Scenario({"correction": {"weight": {"level": "token", "batch_normalize": True}}}),
    "batch_normalize-sequence": Scenario(
        {"correction": {"weight": {"level": "sequence", "batch_normalize": True}}}
    ),
    "icepop": Scenario(
        {"correction": {"weight": {"level": "token", "outside": "zero", "lower": 0.8, "upper": 1.3}}}
    ),
    "geometric": Scenario({"correction": {"weight": {"level": "geometric"}}}),
    "top_entropy": Scenario({"loss": {"top_entropy_share": 0.4}}),
    "entropy": Scenario({"loss": {"entropy": {"coef": 0.2}}}),
    "kl_loss": Scenario({"loss": {"kl": {"coef": 0.3}}}),
    "kl_reward": Scenario({"kl_reward": {"coef": 0.2}}),
    "kl_reward-own_token": Scenario(
        {"kl_reward": {"coef": 0.2}, "advantages": {"type": "grpo", "kl_credit": "own_token"}}
    ),
    "kl_reward-trajectory": Scenario(
        {"kl_reward": {"coef": 0.2}, "advantages": {"type": "grpo", "kl_credit": "trajectory"}}
    ),
    "kl_reward-trajectory-batch": Scenario(  # a deviation over all ranks' trajectories
        {
            "kl_reward": {"coef": 0.2},
            "advantages": {"type": "grpo", "kl_credit": "trajectory", "scale_over": "batch"},
        }
    ),
    "kl_reward-whiten": Scenario({"type": "reinforce_pp", "kl_reward": {"coef": 0.2, "clip_reward": 0.8}}),
    "ppo-critic": Scenario({"type": "ppo", "critic": {"lr": 0.05, "epochs": 3}}),
    "ppo-shared": Scenario({"type": "ppo", "critic": {"shared": True, "coef": 0.5}}),
    "ppo-warmup": Scenario({"type": "ppo", "critic": {"lr": 0.05, "warmup_versions": INDEX + 1}}),
    "ppo-warmed": Scenario({"type": "ppo", "critic": {"lr": 0.05, "warmup_versions": INDEX}}),
    "ppo-refreshed": Scenario(
        {"type": "ppo", "critic": {}, "kl_reward": {}, "reference": {"refresh_every": INDEX + 1}}
    ),
    "ppo-kl": Scenario(
        {"type": "ppo", "critic": {"lr": 0.05}, "kl_reward": {"coef": 0.2, "clip_reward": 0.8}}
    ),
    "positive": Scenario({"loss": {"ptx": {"positive_coef": 0.2}}}),
    "ptx": Scenario({"loss": {"ptx": {"coef": 0.5, "rows_per_minibatch": 3}}}),
    "ptx-kept": Scenario(  # fewer rows than ranks
        {
            "loss": {"ptx": {"coef": 0.5, "rows_per_minibatch": 1}},
            "correction": {"rejections": [REJECTION], "denominator": "kept"},
        }
    ),
    "ptx-shared": Scenario(
        {"type": "ppo", "critic": {"shared": True, "coef": 0.5}, "loss": {"ptx": {"coef": 0.5}}}
    ),
    "custom": Scenario(
        {
            "advantages": {
                "type": "custom",
                "function": f"{__file__}:own_advantages",
                "options": {"shift": 0.5},
            },
            "loss": {
                "policy": {"type": "custom", "function": f"{__file__}:own_loss", "options": {"scale": 2.0}}
            },
        }
    ),
    "target_kl": Scenario({"target_kl": 2e-4}, num_epochs=3),
    "remax": Scenario({"type": "remax"}, num_greedy=1),
    "remax-sequences": Scenario(
        {"type": "remax", "loss": {"aggregation": {"mode": "seq-mean-token-mean"}}}, num_greedy=1
    ),
    "remax-kept": Scenario(
        {
            "type": "remax",
            "loss": {"aggregation": {"mode": "seq-mean-token-sum"}},
            "correction": {"rejections": [REJECTION], "denominator": "kept"},
        },
        num_greedy=1,
    ),
    "gdpo": Scenario({"advantages": "gdpo"}),
    "gdpo-trl": Scenario({"advantages": {"type": "gdpo", "preset": "trl"}}),
    "otb": Scenario({"advantages": {"type": "otb", "steps": "trained"}}),
    "otb-all": Scenario({"advantages": {"type": "otb", "steps": "all", "preset": "verl"}}),
    "pass_at_k": Scenario({"advantages": "pass_at_k"}),
    **{
        f"recipe-{recipe}": Scenario({"type": recipe})
        for recipe in RECIPES
        if recipe not in ("ppo", "remax")  # above
    },
    "opo": Scenario({"advantages": "opo"}),
    "gpg": Scenario({"advantages": "gpg"}),
    "maxrl": Scenario({"advantages": "maxrl"}),
}


def groups_of(scenario: Scenario, model_path: Path) -> list[TrajectoryGroup]:
    """The batch that it trains; rewards from 0 up for maxrl, which divides by their mean."""
    groups = near_groups(model_path)
    if scenario.algorithm.get("advantages") == "maxrl":
        for trajectory in (t for group in groups for t in group.trajectories if t.reward is not None):
            trajectory.reward += 1.0
    return with_greedy(groups) if scenario.num_greedy else groups
