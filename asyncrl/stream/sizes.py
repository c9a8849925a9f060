"""How large messages get, from the configuration. Byte credits and `asyncrl check` use the same figures."""

from __future__ import annotations

from asyncrl.config import Config

BYTES_A_PROMPT_TOKEN = 4
BYTES_A_TOKEN = 13
"""Of a completion: id 4, log-prob 4, version 4, mask 1."""


def max_group_bytes(config: Config) -> int:
    """The arrays of a group on the wire, without its text. Bytes."""
    rollout = config.rollout
    return (
        BYTES_A_PROMPT_TOKEN * config.data.max_prompt_tokens
        + BYTES_A_TOKEN * config.rollouts_per_group * rollout.max_completion_tokens
    )


def max_eval_completion_tokens(config: Config) -> int:
    """The longest completion of an evaluation. Tokens."""
    return config.eval.max_completion_tokens or config.rollout.max_completion_tokens


def max_eval_bytes(config: Config) -> int:
    """The arrays of one prompt's completions in an evaluation, without their text. Bytes."""
    return (
        BYTES_A_PROMPT_TOKEN * config.data.max_prompt_tokens
        + BYTES_A_TOKEN * config.eval.num_samples * max_eval_completion_tokens(config)
    )


def max_shard_bytes(config: Config) -> int:
    """A rank's even share of a batch of such groups: one message. Even in each mini-batch, rounded up there. Bytes."""
    learner = config.learner
    size, num_larger = divmod(learner.prompts_per_batch, learner.minibatches)
    sizes = [size + 1] * num_larger + [size] * (learner.minibatches - num_larger)
    num_groups = sum(-(-size // learner.num_data_ranks) for size in sizes)
    return num_groups * max_group_bytes(config)
