"""Recipes as plain loops: Transformers' own model, one padded row a trajectory, one step a mini-batch, SGD.

No packing, no microbatches, no counts of a plan: sums and means are taken over all tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from learner_cases import plain_model
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.types import TrajectoryGroup


@dataclass
class PlainBatch:
    """The N trained tokens of R trajectories, in order; with gradient where the model has one."""

    logprobs: Tensor
    entropy: Tensor
    hidden: Tensor
    """[N, H]: the decoder's state that predicts each token."""
    sum_pi_squared: Tensor
    rollout: Tensor
    versions: Tensor
    trajectory: Tensor
    """[N] 0..R-1, in the order of the groups."""
    group: Tensor
    """[R]"""
    rewards: list[float | None]
    """[R]"""

    @property
    def num_trajectories(self) -> int:
        return len(self.group)

    @property
    def num_scored(self) -> int:
        """Trajectories with a reward: failed rollouts are in no mean."""
        return sum(reward is not None for reward in self.rewards)

    def rows(self) -> list[Tensor]:
        """[R]: the positions of each trajectory's tokens."""
        return [torch.where(self.trajectory == row)[0] for row in range(self.num_trajectories)]


def plain_batch(model: PreTrainedModel, groups: Sequence[TrajectoryGroup], temperature: float) -> PlainBatch:
    """All logits of all rows."""
    rows = [(group, t) for group in groups for t in group.trajectories]
    longest = max(len(group.prompt_ids) + len(t) for group, t in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    visible = torch.zeros_like(ids)
    for i, (group, t) in enumerate(rows):
        row = np.concatenate([group.prompt_ids, t.token_ids])
        ids[i, : len(row)] = torch.from_numpy(row)
        visible[i, : len(row)] = 1
    hidden = model.get_decoder()(input_ids=ids, attention_mask=visible, use_cache=False).last_hidden_state
    logprobs = (model.get_output_embeddings()(hidden) / temperature).log_softmax(-1)
    places = [(i, j, group, t) for i, (group, t) in enumerate(rows) for j in np.flatnonzero(t.loss_mask)]
    row = torch.tensor([i for i, *_ in places])
    before = torch.tensor([len(group.prompt_ids) + int(j) - 1 for _, j, group, _ in places])
    token = torch.tensor([int(t.token_ids[j]) for _, j, _, t in places])
    of_tokens = logprobs[row, before]
    return PlainBatch(
        logprobs=of_tokens.gather(1, token[:, None])[:, 0],
        entropy=-(of_tokens.exp() * of_tokens).sum(1),
        hidden=hidden[row, before],
        sum_pi_squared=of_tokens.exp().square().sum(1),
        rollout=torch.tensor([float(t.rollout_logprobs[j]) for _, j, _, t in places]),
        versions=torch.tensor([int(t.policy_versions[j]) for _, j, _, t in places]),
        trajectory=row,
        group=torch.tensor([g for g, group in enumerate(groups) for _ in group.trajectories]),
        rewards=[t.reward for _, t in rows],
    )


Loss = Callable[[PlainBatch, PlainBatch, Tensor], Tensor]
"""(tokens now, tokens before the batch's first step, advantages) -> scalar."""


def plain_training(
    model_path: Path,
    minibatches: Sequence[Sequence[TrajectoryGroup]],
    loss: Loss,
    *,
    advantages: Callable[[PlainBatch], Tensor] | None = None,
    num_epochs: int,
    lr: float,
    temperature: float = 0.7,
) -> dict[str, Tensor]:
    """Weights afterwards. `advantages` of the tokens of a mini-batch; those of GRPO by default."""
    model = plain_model(model_path)
    with torch.no_grad():
        at_start = [plain_batch(model, groups, temperature) for groups in minibatches]
    found = [(advantages or grpo_advantages)(batch) for batch in at_start]
    for _ in range(num_epochs):
        for groups, before, of_tokens in zip(minibatches, at_start, found, strict=True):
            loss(plain_batch(model, groups, temperature), before, of_tokens).backward()
            sgd(model.parameters(), lr)
    return {name: p.detach() for name, p in model.named_parameters()}


@torch.no_grad()
def sgd(parameters, lr: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter -= lr * parameter.grad
            parameter.grad = None


def grpo_advantages(batch: PlainBatch) -> Tensor:
    """[N]"""
    rewards = np.array([np.nan if r is None else r for r in batch.rewards])
    advantages = np.zeros(len(rewards))
    for group in range(int(batch.group.max()) + 1):
        own = (batch.group == group).numpy()
        centred = rewards[own] - np.nanmean(rewards[own])
        advantages[own] = np.nan_to_num(centred / (np.nanstd(rewards[own], ddof=1) + 1e-6))
    return torch.tensor(advantages).float()[batch.trajectory]


def token_rewards(
    batch: PlainBatch, kl: Tensor | None = None, coef: float = 0.0, clip: float = 1e9
) -> Tensor:
    """[N]: the reward, cut to +-clip, at each trajectory's last token, minus coef * kl."""
    found = torch.zeros(len(batch.logprobs))
    for row, reward in zip(batch.rows(), batch.rewards, strict=True):
        if len(row):
            assert reward is not None
            found[row[-1]] = min(max(reward, -clip), clip)
    return found if kl is None else found - coef * kl


def gae(batch: PlainBatch, rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """[N], token by token from the end."""
    advantages = torch.zeros_like(values)
    for row in batch.rows():
        following = next_value = 0.0
        for i in reversed(row.tolist()):
            error = float(rewards[i]) + gamma * next_value - float(values[i])
            following = error + gamma * lam * following
            next_value = float(values[i])
            advantages[i] = following
    return advantages


def clipped(batch: PlainBatch, proximal: Tensor, advantages: Tensor, low: float = 0.2, high: float = 0.2):
    """PPO's loss [N]."""
    ratio = (batch.logprobs - proximal).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def _by_trajectory(batch: PlainBatch, of_tokens: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.stack([reduce(of_tokens[row]) for row in batch.rows() if len(row)]).sum()


def _prompt_mean(batch: PlainBatch, of_tokens: Tensor) -> Tensor:
    group = batch.group[batch.trajectory]
    return torch.stack([of_tokens[group == g].mean() for g in group.unique()]).mean()


AGGREGATED: dict[str, Callable[[PlainBatch, Tensor], Tensor]] = {
    "token-mean": lambda b, x: x.mean(),
    "token-sum": lambda b, x: x.sum(),
    "seq-mean-token-sum": lambda b, x: x.sum() / b.num_scored,
    "seq-mean-token-mean": lambda b, x: _by_trajectory(b, x, torch.mean) / b.num_scored,
    "seq-mean-token-sum-norm": lambda b, x: x.sum() / 16 / b.num_scored,
    "prompt-mean": _prompt_mean,
}
"""Mode -> (batch, loss of each token) -> scalar; the constant length is 16."""
