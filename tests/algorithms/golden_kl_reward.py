"""kl_reward: rewards and KL penalties at single tokens. The estimates of the KL are inputs: topic kl judges them."""

from __future__ import annotations

import torch

from asyncrl.algorithms.advantages import minus_kl, token_rewards
from asyncrl.algorithms.segments import Segments
from tests.algorithms.advantage_tables import assert_tokens_equal
from tests.algorithms.goldens import Golden, assert_equal

ESTIMATES = {
    "k1": lambda log_ratio: log_ratio,
    "abs": torch.abs,
    "mse": lambda log_ratio: log_ratio.square() / 2,
}


def replay(case: Golden) -> None:
    name = case.function.rsplit("::")[-1].rsplit(".")[-1]
    if case.peer == "deepspeed_chat":
        _deepspeed_chat(case)
    elif name == "apply_kl_penalty":
        _apply_kl_penalty(case)
    elif case.peer == "verl":  # no mask: every column is a trained token
        kl = case.tensor("old_log_probs") - case.tensor("ref_log_probs")
        rewards = minus_kl(case.tensor("token_scores"), kl, case.params["kl_ratio"])
        assert_equal(case, "token_rewards", rewards, case.output("token_rewards"))
    else:
        _terminal(case)


def _terminal(case: Golden) -> None:
    coef, clip = case.params["kl_coef"] or 0.0, case.params.get("reward_clip_range")
    kl = case.flat("kl") if "kl" in case.inputs else case.flat("log_probs") - case.flat("ref_log_probs")
    rewards = token_rewards(
        case.tensor("rewards"),
        case.segments,
        kl=kl,
        kl_coef=max(coef, 0.0),  # OpenRLHF takes a negative one for 0
        clip=None if clip is None else (clip[0], clip[1]),
    )
    assert_tokens_equal(case, "token_rewards", rewards)


def _apply_kl_penalty(case: Golden) -> None:
    """The coefficient afterwards is topic kl_controller's."""
    log_ratio = case.flat("old_log_probs") - case.flat("ref_log_probs")
    kl = ESTIMATES[case.params["estimator"]](log_ratio)
    rewards = minus_kl(case.flat("token_scores"), kl, case.params["init_kl_coef"])
    assert_tokens_equal(case, "token_rewards", rewards)
    mean_kl = case.segments.mean(kl).mean()
    expected = torch.tensor(case.outputs["metrics"]["actor/reward_kl_penalty"], dtype=case.dtype)
    assert_equal(case, "actor/reward_kl_penalty", mean_kl, expected)


def _deepspeed_chat(case: Golden) -> None:
    """The answer starts before its first token's column, and one column after its last valid one counts to it."""
    start, width = (
        case.params.get("prompt_length", case.inputs["prompt_length"]) - 1,
        len(case.inputs["action_mask"][0]),
    )
    ends = (start + case.tensor("action_mask")[:, start:].sum(1).long() + 1).clamp(max=width)
    mask = torch.arange(width) < ends[:, None]
    limit = case.params["clip_reward_value"]
    rewards = token_rewards(
        case.tensor("rewards"),
        Segments.of_counts(mask.sum(1)),
        kl=(case.tensor("log_probs") - case.tensor("ref_log_probs"))[mask],
        kl_coef=case.params["kl_ctl"],
        clip=(-limit, limit),
    )
    assert_equal(case, "token_rewards", rewards, case.output("token_rewards")[mask])
