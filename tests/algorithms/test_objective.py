"""The objective: presets, parts with their own counts, and that splitting changes nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from asyncrl.algorithms.losses.aggregation import Counts
from asyncrl.algorithms.losses.objective import LossCounts, objective, ptx_term
from asyncrl.algorithms.losses.policy import LossTokens, select_tokens
from asyncrl.algorithms.segments import Segments
from asyncrl.config.loss_presets import LOSS_PRESETS, PEERS
from asyncrl.config.losses import LossConfig, PtxConfig

TYPES = [
    "ppo",
    "gspo",
    "gmpo",
    "cispo",
    "sapo",
    "dppo",
    "ipo",
    "clip_cov",
    "kl_cov",
    "reinforce",
    "importance_weighted",
    "dro",
    "vespo",
    "cross_entropy",
]
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"]


def random_tokens(counts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    n = sum(counts)

    def logprobs():
        return -torch.rand(n, generator=generator, dtype=torch.float64) * 3

    return LossTokens(
        learner_logprobs=logprobs(),
        proximal_logprobs=logprobs(),
        advantages=torch.randn(n, generator=generator, dtype=torch.float64),
        segments=Segments.of_counts(counts),
        group_index=torch.arange(len(counts)) // 2,
        rollout_logprobs=logprobs(),
        ref_logprobs=logprobs(),
        entropy=torch.rand(n, generator=generator, dtype=torch.float64),
        token_weights=torch.rand(n, generator=generator, dtype=torch.float64),
        positive=torch.rand(n, generator=generator) > 0.5,
    )


def rows(tokens, first, last):
    """Trajectories first..last-1 as a microbatch."""
    segments = tokens.segments
    chosen = (segments.index >= first) & (segments.index < last)
    cut = {
        name: getattr(tokens, name)[chosen]
        for name in (
            "learner_logprobs",
            "proximal_logprobs",
            "advantages",
            "rollout_logprobs",
            "ref_logprobs",
            "entropy",
            "token_weights",
            "positive",
        )
    }
    return replace(
        tokens,
        **cut,
        selected=None if tokens.selected is None else tokens.selected[chosen],
        segments=Segments.of_counts(segments.counts()[first:last]),
        group_index=tokens.group_index[first:last],
    )


def gradient_of(config, parts, counts):
    """(loss, gradient with respect to the learner's log-probs) summed over microbatches."""
    total, gradients = 0.0, []
    for part in parts:
        learner = part.learner_logprobs.clone().requires_grad_()
        loss = objective(config, replace(part, learner_logprobs=learner), counts).loss
        loss.backward()
        total += float(loss.detach())
        gradients.append(learner.grad)
    return total, torch.cat(gradients).tolist()


@settings(deadline=None, max_examples=120)
@given(
    kind=st.sampled_from(TYPES),
    mode=st.sampled_from(MODES),
    counts=st.lists(st.integers(0, 4), min_size=4, max_size=8).filter(
        lambda c: sum(c) > 0 and len(c) % 2 == 0
    ),
    cut=st.integers(0, 4),
)
def test_the_sum_over_microbatches_is_the_loss_of_the_mini_batch(kind, mode, counts, cut):
    # Mutations caught: a mean in any loss; a selection of clip_cov, kl_cov or top entropy a microbatch at a time.
    config = LossConfig.model_validate(
        {
            "policy": {"type": kind},
            "aggregation": {"mode": mode, "length": 10.0},
            "kl": {"coef": 0.1},
            "entropy": {"coef": 0.01},
            "ptx": {"positive_coef": 0.3},
            "top_entropy_share": None if kind in ("clip_cov", "kl_cov") else 0.5,
        }
    )
    whole = random_tokens(counts)
    whole = replace(whole, selected=select_tokens(config, whole))
    cut = min(2 * cut, len(counts))  # groups of two stay whole
    parts = [rows(whole, 0, cut), rows(whole, cut, len(counts))]
    totals = LossCounts(
        Counts.of(whole.segments, whole.group_index), positive_tokens=float(whole.positive.sum())
    )
    loss, gradients = gradient_of(config, [whole], totals)
    split_loss, split_gradients = gradient_of(config, parts, totals)
    assert split_loss == pytest.approx(loss, abs=1e-9)
    assert split_gradients == pytest.approx(gradients, abs=1e-9)


@pytest.mark.parametrize("kind", TYPES)
def test_a_microbatch_without_tokens_has_the_same_keys_and_a_loss_of_zero(kind):
    # Mutation caught: a key that is there only where something was clipped; the mean of nothing.
    config = LossConfig.model_validate({"policy": {"type": kind}, "kl": {}})
    full, empty = random_tokens([2, 1]), random_tokens([0, 0])
    counts = LossCounts(Counts(3, 2, 2, 1))
    selected = torch.zeros(3, dtype=torch.bool)
    with_tokens = objective(config, replace(full, selected=selected), counts)
    without = objective(config, replace(empty, selected=selected[:0]), counts)
    assert float(without.loss) == 0.0
    assert with_tokens.parts.keys() == without.parts.keys()
    assert with_tokens.diagnostics.keys() == without.diagnostics.keys()


def test_each_part_by_hand():
    # Mutations caught: the KL weighed by the correction, the entropy's sign, good answers over the policy's tokens.
    config = LossConfig.model_validate(
        {
            "policy": {"type": "reinforce"},
            "kl": {"coef": 0.5, "estimator": "k1"},
            "entropy": {"coef": 0.1},
            "ptx": {"positive_coef": 3.0},
        }
    )
    tokens = LossTokens(
        learner_logprobs=torch.tensor([-1.0, -2.0]),
        proximal_logprobs=torch.tensor([-1.5, -2.0]),
        advantages=torch.tensor([1.0, -1.0]),
        segments=Segments.of_counts([2]),
        ref_logprobs=torch.tensor([-2.0, -2.0]),
        entropy=torch.tensor([1.0, 3.0]),
        token_weights=torch.tensor([0.0, 2.0]),
        positive=torch.tensor([False, True]),
    )
    found = objective(config, tokens, LossCounts(Counts(4, 1, 1, 1), positive_tokens=2))
    parts = {name: float(part) for name, part in found.parts.items()}
    expected = {"policy": -4 / 4, "kl": 0.5 / 4, "entropy": -0.1, "positive": 3 * 2 / 2}
    assert parts == pytest.approx(expected)
    assert float(found.loss) == pytest.approx(sum(expected.values()))
    assert found.diagnostics["ppo_kl"].tolist() == [-0.5, 0.0]


def test_the_shares_of_supervised_tokens_sum_to_coef_times_their_mean():
    # Mutations caught: the mean of each microbatch; the coefficient left out; the log-prob's sign.
    config = PtxConfig(coef=2.0)
    shares = [ptx_term(config, torch.tensor(part), 5) for part in ([-4.0, -5.0, -6.0], [-1.0, -2.0], [])]
    assert [float(share) for share in shares] == pytest.approx([2 * 15 / 5, 2 * 3 / 5, 0.0])


def test_a_part_may_have_a_count_of_its_own():
    # Mutation caught: the policy's count for every part.
    config = LossConfig.model_validate(
        {"policy": {"type": "reinforce"}, "kl": {"coef": 1.0, "estimator": "k1"}}
    )
    tokens = random_tokens([2])
    alone = objective(config, tokens, LossCounts(Counts(2, 1, 1, 1)))
    halved = objective(config, tokens, LossCounts(Counts(2, 1, 1, 1), kl=Counts(4, 1, 1, 1)))
    assert float(halved.parts["kl"]) == pytest.approx(float(alone.parts["kl"]) / 2)
    assert float(halved.parts["policy"]) == float(alone.parts["policy"])


def test_what_the_loss_reads_must_be_there():
    # Mutation caught: silently no KL.
    config = LossConfig.model_validate({"kl": {}})
    tokens = replace(random_tokens([2]), ref_logprobs=None)
    with pytest.raises(ValueError, match="ref_logprobs"):
        objective(config, tokens, LossCounts(Counts(2, 1, 1, 1)))


def test_a_nan_token_reaches_the_loss_and_an_infinite_ratio_does_not():
    # Mutations caught: nan_to_num anywhere; exp without the cut.
    tokens = random_tokens([2, 1])
    counts = LossCounts(Counts(3, 2, 2, 2))
    far = replace(tokens, proximal_logprobs=tokens.proximal_logprobs - 500.0)
    assert math.isfinite(float(objective(LossConfig(), far, counts).loss))
    broken = replace(tokens, learner_logprobs=torch.tensor([math.nan, -1.0, -1.0], dtype=torch.float64))
    assert math.isnan(float(objective(LossConfig(), broken, counts).loss))


@pytest.mark.parametrize("peer", PEERS)
def test_every_preset_is_a_valid_configuration(peer):
    # Mutation caught: an option that is misspelt, or out of its bounds.
    for kind in {"ppo", *LOSS_PRESETS[peer]} - {"any"}:
        config = LossConfig.model_validate({"preset": peer, "policy": {"type": kind}, "kl": {}})
        assert config.policy.type == kind


def test_explicit_options_win_over_the_preset():
    # Mutations caught: the preset on top; a table of options that replaces the preset's whole.
    config = LossConfig.model_validate({"preset": "verl", "policy": {"type": "ppo", "clip_high": 0.28}})
    assert config.policy.model_dump()["dual_clip"] == 3.0
    assert config.policy.model_dump()["clip_high"] == 0.28
    assert config.kl is None
    config = LossConfig.model_validate(
        {"preset": "verl", "policy": {"type": "ppo", "dual_clip": None}, "kl": {"coef": 0.1}}
    )
    assert config.policy.model_dump()["dual_clip"] is None
    assert config.kl is not None
    assert (config.kl.coef, config.kl.clamp_log_ratio) == (0.1, 20.0)
    with pytest.raises(ValidationError, match="preset"):
        LossConfig.model_validate({"preset": "nobody"})
