"""Small models, uneven batches and a plain reference for the learner's tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from asyncrl.config import Config
from asyncrl.learner.update import PolicyLearner
from asyncrl.types import Plan, Shard, Status, Trajectory, TrajectoryGroup

VOCABULARY = 67  # odd: two ranks hold unequal rows of the embedding


def write_model(folder: Path, kind: str, tied: bool, dtype: torch.dtype = torch.float32) -> Path:
    """A model of two layers, four heads and two key heads, with weights large enough to matter."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "initializer_range": 0.15,
    }
    torch.manual_seed(11)
    model = (
        LlamaForCausalLM(LlamaConfig(**shape)) if kind == "llama" else Qwen2ForCausalLM(Qwen2Config(**shape))
    )
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
    """The shard of `rank` under `microbatches` [rank][microbatch] -> positions of groups."""
    plan = Plan(
        index=index,
        ordinals=[group.ordinal for group in groups],
        rewards=[[t.reward for t in group.trajectories] for group in groups],
        num_trained_tokens=[[int(t.loss_mask.sum()) for t in group.trajectories] for group in groups],
        microbatches=microbatches,
    )
    return Shard(plan, rank, [[groups[i] for i in positions] for positions in microbatches[rank]])


def hand_advantages(group: TrajectoryGroup) -> list[float]:
    """GRPO's, with numpy."""
    rewards = np.array([np.nan if t.reward is None else t.reward for t in group.trajectories])
    centred = rewards - np.nanmean(rewards)
    return list(np.nan_to_num(centred / (np.nanstd(rewards, ddof=1) + 1e-6)))


def plain_rows(
    model_path: Path, groups: list[TrajectoryGroup], temperature: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of the trained tokens, and gradients of GRPO's token mean, one padded row a trajectory, all
    logits, eager attention: no packing, no sharing of prompts, no chunks."""
    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
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
    trained: list[torch.Tensor] = []
    loss = torch.zeros(())
    for i, (group, t, advantage) in enumerate(rows):
        for j in np.flatnonzero(t.loss_mask):
            logprob = logprobs[i, len(group.prompt_ids) + j - 1, int(t.token_ids[j])]
            weight = min(float((logprob.detach() - float(t.rollout_logprobs[j])).exp()), 2.0)
            loss = (
                loss - logprob * weight * advantage
            )  # the ratio is 1, and its gradient that of the log-prob
            trained.append(logprob.detach())
    (loss / len(trained)).backward()
    return torch.stack(trained), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


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
        yield PolicyLearner(model_path, config, mesh=init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()


def record_gradients(learner: PolicyLearner) -> dict[str, torch.Tensor]:
    """Filled with this rank's shards of the gradients when the next optimizer step begins."""
    recorded: dict[str, torch.Tensor] = {}
    take_step = learner._optimizer.step

    def step(version: int) -> tuple[float, float]:
        for name, parameter in learner._policy.transformer.named_parameters():
            recorded[name] = parameter.grad.to_local().clone()
        return take_step(version)

    learner._optimizer.step = step
    return recorded


def weights(learner: PolicyLearner) -> dict[str, torch.Tensor]:
    """A copy of this rank's shards."""
    return {shard.name: shard.rows.clone() for shard in learner.named_shards()}


def sgd_config(**learner: object) -> Config:
    """Plain gradient descent, so that weights show the gradient's size; no clipping unless asked for."""
    table = {"optimizer": "sgd", "lr": 0.5, "max_grad_norm": 1e6, "logprob_chunk_tokens": 7} | learner
    return Config.model_validate({"learner": table, "rollout": {"temperature": 0.7}})
