"""GRPO: group-relative advantages, clipped policy loss, truncated importance sampling (arXiv:2402.03300)."""

from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.advantages import group_advantages
from asyncrl.algorithms.correction import importance_weights
from asyncrl.algorithms.losses import bounded_exp, clipped_policy_loss
from asyncrl.algorithms.recipe import LossSums, TokenBatch
from asyncrl.config import GrpoConfig


class Grpo:
    """The recipe `grpo`: each stage is a function in a file beside this one."""

    def __init__(self, config: GrpoConfig) -> None:
        self._config = config

    def advantages(self, rewards: Tensor, group_index: Tensor) -> Tensor:
        return group_advantages(
            rewards,
            group_index,
            divide_by_std=self._config.scale == "std",
            std_epsilon=self._config.std_epsilon,
        )

    def loss(self, batch: TokenBatch) -> LossSums:
        token_loss, clipped = clipped_policy_loss(
            batch.learner_logprobs,
            batch.proximal_logprobs,
            batch.advantages,
            clip_low=self._config.clip_low,
            clip_high=self._config.clip_high,
        )
        weights, truncated = importance_weights(
            batch.proximal_logprobs, batch.rollout_logprobs, self._config.correction
        )
        loss = (token_loss * weights).sum()
        learner_logprobs = batch.learner_logprobs.detach()
        mismatch = batch.proximal_logprobs - batch.rollout_logprobs
        return LossSums(
            loss=loss,
            sums={
                "actor/pg_loss": loss.detach(),
                "actor/pg_clipfrac": clipped.sum(),
                "actor/ppo_kl": (batch.proximal_logprobs - learner_logprobs).sum(),
                "actor/entropy": batch.entropy.sum(),
                "correction/weight_mean": weights.sum(),
                "correction/truncated_share": truncated.sum(),
                # Estimates of KL(rollout || proximal) from samples of the rollout: joschu.net/blog/kl-approx
                "mismatch/k1": -mismatch.sum(),
                "mismatch/k3": (bounded_exp(mismatch) - 1.0 - mismatch).sum(),
            },
            maxima={
                "correction/weight_max": _max(weights),
                "mismatch/logprob_diff_max": _max(mismatch.abs()),
            },
        )


def _max(values: Tensor) -> Tensor:
    """0 for no values; values are not negative."""
    return values.max() if len(values) else values.new_zeros(())
