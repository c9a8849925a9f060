"""Small models, uneven batches and a plain reference for the learner's tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from asyncrl.config import Config
from asyncrl.learner.mesh import make_mesh
from asyncrl.learner.update import PolicyLearner
from asyncrl.types import Plan, Shard, Status, Trajectory, TrajectoryGroup

VOCABULARY = 67  # odd: two ranks hold unequal rows of the embedding


def write_model(
    folder: Path, kind: str, tied: bool, dtype: torch.dtype = torch.float32, hidden_size: int = 32
) -> Path:
    """A model of two layers, four heads and two key heads, with weights large enough to matter."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "initializer_range": 0.15,
    }
    torch.manual_seed(11)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shape))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=8))
    with torch.no_grad():
        for parameter in model.parameters():  # no bias and no norm may be 0 or 1
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.to(dtype).save_pretrained(folder)
    return folder


def trajectory(rng: np.random.Generator, mask: list[int], reward: float | None) -> Trajectory:
    """A trajectory of random tokens with this loss mask."""
    length = len(mask)
    return Trajectory(
        token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
        loss_mask=np.array(mask, np.uint8),
        rollout_logprobs=-rng.uniform(1.0, 8.0, length).astype(np.float32),
        policy_versions=np.zeros(length, np.int32),
        reward=reward,
        status=Status.SCORED if reward is not None else Status.REWARD_FAILED,
        finish_reason="stop",
    )


def uneven_groups(seed: int = 0) -> list[TrajectoryGroup]:
    """Five groups: uneven lengths, masks with holes, empty, untrained and unscored trajectories, a prompt of one
    token, completions of one token, and a group where only first tokens train."""
    rng = np.random.default_rng(seed)
    shapes: list[tuple[int, list[tuple[list[int], float | None]]]] = [
        (5, [([1] * 3, 1.0), ([1] * 7, 0.0), ([1, 1], 0.25)]),
        (1, [([0, 1, 0, 1, 1], 0.0), ([], 1.0), ([1, 1, 0, 0], 1.0), ([0, 0, 0], 0.5)]),
        (9, [([1] * 4, 2.0), ([1] * 4, -1.0), ([1] * 4, None)]),
        (2, [([1], 0.0), ([1], 1.0), ([1, 0], 3.0)]),
        (3, [([0, 0, 1, 1, 1, 1, 1, 1, 1], 1.0), ([1], 0.0)]),
    ]
    return [
        TrajectoryGroup(
            ordinal=10 + 3 * i,
            redraw=0,
            prompt_ids=rng.integers(0, VOCABULARY, prompt_length).astype(np.int32),
            trajectories=[trajectory(rng, mask, reward) for mask, reward in rows],
        )
        for i, (prompt_length, rows) in enumerate(shapes)
    ]


def shard_of(
    groups: list[TrajectoryGroup], microbatches: list[list[list[int]]], rank: int = 0, index: int = 0
) -> Shard:
    """The shard of `rank` in one mini-batch, with `microbatches` [rank][microbatch] -> positions of groups."""
    return shard_of_minibatches(groups, [microbatches], rank=rank, index=index)


def shard_of_minibatches(
    groups: list[TrajectoryGroup],
    minibatches: list[list[list[list[int]]]],
    *,
    num_epochs: int = 1,
    rank: int = 0,
    index: int = 0,
) -> Shard:
    """The shard of `rank` under `minibatches` [mini-batch][rank][microbatch] -> positions of groups."""
    plan = Plan(
        index=index,
        ordinals=[group.ordinal for group in groups],
        rewards=[[t.reward for t in group.trajectories] for group in groups],
        num_trained_tokens=[[int(t.loss_mask.sum()) for t in group.trajectories] for group in groups],
        minibatches=minibatches,
        num_epochs=num_epochs,
    )
    return Shard(plan, rank, [groups[position] for position in plan.positions_of(rank)])


def hand_advantages(group: TrajectoryGroup) -> list[float]:
    """GRPO's, with numpy."""
    rewards = np.array([np.nan if t.reward is None else t.reward for t in group.trajectories])
    centred = rewards - np.nanmean(rewards)
    return list(np.nan_to_num(centred / (np.nanstd(rewards, ddof=1) + 1e-6)))


def plain_model(model_path: Path) -> PreTrainedModel:
    """Transformers' own, with eager attention."""
    return AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


class PlainTokens(NamedTuple):
    """The trained tokens of some groups, [N] each."""

    logprobs: torch.Tensor
    """With gradient."""
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor


def plain_tokens(model: PreTrainedModel, groups: list[TrajectoryGroup], temperature: float) -> PlainTokens:
    """One padded row a trajectory, all logits: no packing, no sharing of prompts, no chunks."""
    rows = [
        (group, t, a)
        for group in groups
        for t, a in zip(group.trajectories, hand_advantages(group), strict=True)
    ]
    longest = max(len(group.prompt_ids) + len(t) for group, t, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    visible = torch.zeros_like(ids)
    for i, (group, t, _) in enumerate(rows):
        row = np.concatenate([group.prompt_ids, t.token_ids])
        ids[i, : len(row)] = torch.from_numpy(row)
        visible[i, : len(row)] = 1
    logits = model(input_ids=ids, attention_mask=visible, use_cache=False).logits / temperature
    logprobs = logits.log_softmax(-1)
    trained = [
        (logprobs[i, len(group.prompt_ids) + j - 1, int(t.token_ids[j])], float(t.rollout_logprobs[j]), a)
        for i, (group, t, a) in enumerate(rows)
        for j in np.flatnonzero(t.loss_mask)
    ]
    found, rollout, advantages = zip(*trained, strict=True)
    return PlainTokens(torch.stack(found), torch.tensor(rollout), torch.tensor(advantages).float())


def plain_rows(
    model_path: Path, groups: list[TrajectoryGroup], temperature: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of the trained tokens, and gradients of GRPO's token mean where all ratios are 1."""
    model = plain_model(model_path)
    tokens = plain_tokens(model, groups, temperature)
    logprobs = tokens.logprobs.detach()
    weights = (logprobs - tokens.rollout_logprobs).exp().clamp(max=2.0)
    # The gradient of a ratio of 1 is that of its log-prob.
    (-(tokens.logprobs * weights * tokens.advantages).sum() / len(logprobs)).backward()
    return logprobs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def plain_steps(
    model_path: Path,
    minibatches: list[list[TrajectoryGroup]],
    *,
    num_epochs: int,
    lr: float,
    temperature: float,
    clip: float = 0.2,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights after plain SGD with PPO's clipped ratios, and metrics: one step a mini-batch, `num_epochs` times.

    The log-probs before the first step are stored and are the denominators of all ratios.
    """
    model = plain_model(model_path)
    with torch.no_grad():
        stored = [plain_tokens(model, groups, temperature).logprobs for groups in minibatches]
    losses, clipped, log_ratios, norms = [], [], [], []
    for groups, proximal in list(zip(minibatches, stored, strict=True)) * num_epochs:
        tokens = plain_tokens(model, groups, temperature)
        ratio = (tokens.logprobs - proximal).exp()
        surrogate = torch.stack([ratio, ratio.clamp(1 - clip, 1 + clip)]) * tokens.advantages
        weights = (proximal - tokens.rollout_logprobs).exp().clamp(max=2.0)
        loss = -surrogate.min(0).values * weights
        loss.mean().backward()
        norms.append(sum(float(p.grad.double().square().sum()) for p in model.parameters()) ** 0.5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
                parameter.grad = None
        losses += loss.tolist()
        clipped += (surrogate[1] < surrogate[0]).tolist()
        log_ratios += ratio.log().tolist()
    return {name: p.detach() for name, p in model.named_parameters()}, {
        "actor/pg_loss": float(np.mean(losses)),
        "actor/pg_clipfrac": float(np.mean(clipped)),
        "actor/ppo_kl": -float(np.mean(log_ratios)),
        "actor/grad_norm": float(np.mean(norms)),
    }


def assert_gradients_close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float = 1e-5
) -> None:
    """Relative in the norm of each tensor: GRPO's loss is about 0 whatever happens, its gradient is not."""
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        scale = gradient.norm()
        assert scale > 1e-4, f"{name}: a gradient of {scale} proves nothing"
        assert (found[name] - gradient).norm() < rtol * scale, name


@contextmanager
def one_rank(model_path: Path, config: Config, store: Path) -> Iterator[PolicyLearner]:
    """A PolicyLearner alone in a process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        yield PolicyLearner(model_path, config, mesh=make_mesh("cpu", 1))
    finally:
        dist.destroy_process_group()


def record_gradients(learner: PolicyLearner) -> dict[str, torch.Tensor]:
    """Filled with this rank's shards of the gradients when an optimizer step begins: the newest step's."""
    recorded: dict[str, torch.Tensor] = {}
    optimizer = learner._policy_steps.optimizer
    take_step = optimizer.step

    def step(version: int, number: int, *, scale: float) -> tuple[float, float]:
        for name, parameter in learner._models.policy.transformer.named_parameters():
            if parameter.grad is not None:  # a model's own weights have none beneath adapters
                recorded[name] = parameter.grad.to_local() * scale
        return take_step(version, number, scale=scale)

    optimizer.step = step
    return recorded


def weights(learner: PolicyLearner) -> dict[str, torch.Tensor]:
    """A copy of this rank's shards."""
    return {shard.name: shard.rows.clone() for shard in learner.named_shards()}


def sgd_config(**learner: object) -> Config:
    """Plain gradient descent, so that weights show the gradient's size; no clipping unless asked for."""
    table = {"optimizer": "sgd", "lr": 0.5, "max_grad_norm": 1e6, "logprob_chunk_tokens": 7} | learner
    return Config.model_validate({"learner": table, "rollout": {"temperature": 0.7}})
