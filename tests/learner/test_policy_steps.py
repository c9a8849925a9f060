"""Policy losses, aggregations, correction and early stop against plain loops: two mini-batches, two epochs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flow_cases import (
    INDEX,
    SCENARIOS,
    Scenario,
)
from learner_cases import plain_model
from plain_loop import (
    AGGREGATED,
    PlainBatch,
    clipped,
    grpo_advantages,
    plain_batch,
    plain_training,
    sgd,
)
from recipe_cases import Flow, assert_trained, default_loss, kept_by_k3, sequence_mean, tis
from torch import Tensor

from asyncrl.errors import LearnerError


@pytest.fixture
def flow(tmp_path: Path) -> Flow:
    return Flow.at(tmp_path)


def _token_ratio(now: PlainBatch, before: PlainBatch) -> Tensor:
    return (now.logprobs - before.logprobs).exp()


def _sequence_ratio(now: PlainBatch, before: PlainBatch) -> Tensor:
    return sequence_mean(now, now.logprobs - before.logprobs).exp()


def _ppo(ratio: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def _dppo_keep(now: PlainBatch, before: PlainBatch, a: Tensor) -> Tensor:
    p, q = now.logprobs.detach().exp(), before.logprobs.exp()
    return ~((p - q > 0.01) & (a > 0) | (q - p > 0.01) & (a < 0))


def _pessimistic(now: PlainBatch, before: PlainBatch, a: Tensor) -> Tensor:
    """GMPO's log ratio of each token: cut at +-0.1 where that makes the surrogate smaller."""
    log_ratio = now.logprobs - before.logprobs
    cut = log_ratio.clamp(-0.1, 0.1)
    return torch.where(a > 0, torch.minimum(log_ratio, cut), torch.maximum(log_ratio, cut))


def _whole_ratio(now: PlainBatch, before: PlainBatch) -> Tensor:
    """VESPO's: [N], of each token's trajectory the product of its ratios. No gradient."""
    ratio = _token_ratio(now, before).detach()
    found = torch.zeros_like(ratio)
    for row in now.rows():
        found[row] = ratio[row].prod()
    return found


PLAIN_LOSSES: dict[str, Callable[[PlainBatch, PlainBatch, Tensor], Tensor]] = {
    "ppo": lambda n, b, a: torch.where(
        a < 0,
        torch.minimum(_ppo(_token_ratio(n, b), a, 0.2, 0.28), -1.5 * a),
        _ppo(_token_ratio(n, b), a, 0.2, 0.28),
    ),
    "gspo": lambda n, b, a: _ppo(_sequence_ratio(n, b), a, 3e-4, 4e-4),
    "cispo": lambda n, b, a: -_token_ratio(n, b).detach().clamp(0, 1.05) * a * n.logprobs,
    "sapo": lambda n, b, a: (
        -torch.where(
            a > 0,
            4 * torch.sigmoid(_token_ratio(n, b) - 1),
            4 / 1.05 * torch.sigmoid(1.05 * (_token_ratio(n, b) - 1)),
        )
        * a
    ),
    "dppo": lambda n, b, a: torch.where(_dppo_keep(n, b, a), -_token_ratio(n, b) * a, 0.0),
    "ipo": lambda n, b, a: torch.where(
        (n.logprobs.detach().exp() - b.logprobs.exp()).abs() <= 0.01, -_token_ratio(n, b) * a, 0.0
    ),
    "reinforce": lambda n, b, a: -a * n.logprobs,
    "importance_weighted": lambda n, b, a: -_token_ratio(n, b) * a,
    "dro": lambda n, b, a: -(a * n.logprobs - 0.25 * (n.logprobs - b.logprobs) ** 2),
    "cross_entropy": lambda n, b, a: -n.logprobs,
    "kl_cov": lambda n, b, a: (
        -_token_ratio(n, b) * a + torch.where(_largest_covariance(b, a), (n.logprobs - b.logprobs).abs(), 0.0)
    ),
    "gmpo": lambda n, b, a: -sequence_mean(n, a) * sequence_mean(n, _pessimistic(n, b, a)).exp(),
    "vespo": lambda n, b, a: (
        -torch.where(
            a >= 0,
            _whole_ratio(n, b) ** 2 * (3 - 3 * _whole_ratio(n, b)).exp(),
            _whole_ratio(n, b) ** 3 * (2 - 2 * _whole_ratio(n, b)).exp(),
        )
        * a
        * n.logprobs
    ),
    "top_entropy": lambda n, b, a: (
        _ppo(_token_ratio(n, b), a, 0.2, 0.2) * (b.entropy >= torch.quantile(b.entropy, 0.6))
    ),
}


def _covariance(before: PlainBatch, a: Tensor) -> Tensor:
    return (a - a.mean()) * (before.logprobs - before.logprobs.mean())


def _largest_covariance(before: PlainBatch, a: Tensor) -> Tensor:
    covariance = _covariance(before, a)
    return covariance >= covariance.topk(int(0.2 * len(a))).values[-1]


# Mutations caught: a selection of the batch instead of the mini-batch, or made anew each step; an option of the table
# that does not reach the loss; the mean of GMPO's ratios for the exp of the mean, its cut on both sides;
# VESPO's ratio of a token, its geometric mean, or its gradient; k and lambda of the other sign.
@pytest.mark.parametrize("name", PLAIN_LOSSES)
def test_a_policy_loss_is_its_formula_through_all_steps(flow: Flow, name: str):
    found, _ = flow.train(SCENARIOS[name], "pieces")
    of_token = PLAIN_LOSSES[name]
    expected = plain_training(
        flow.model_path,
        flow.halves,
        lambda now, before, a: (of_token(now, before, a) * tis(before)).mean(),
        num_epochs=2,
        lr=0.05,
    )
    assert_trained(flow, found, expected)


def test_clip_cov_leaves_out_the_tokens_between_its_bounds(flow: Flow):
    # Mutations caught: means of the batch or a microbatch for the mini-batch's; the others left out; their loss kept
    # and the ratio cut instead; covariances anew in each step. With share 1 nothing is drawn: all of them are left out.
    bounds = {"lowest": -0.3, "highest": 0.4}
    found, _ = flow.train(
        Scenario({"loss": {"policy": {"type": "clip_cov", "share": 1.0, **bounds}}}), "pieces"
    )
    shares = []

    def loss(now: PlainBatch, before: PlainBatch, a: Tensor) -> Tensor:
        covariance = _covariance(before, a)
        left_out = (covariance > bounds["lowest"]) & (covariance < bounds["highest"])
        shares.append(float(left_out.float().mean()))
        return torch.where(left_out, 0.0, clipped(now, before.logprobs, a) * tis(before)).mean()

    assert_trained(flow, found, plain_training(flow.model_path, flow.halves, loss, num_epochs=2, lr=0.05))
    assert all(0.1 < share < 0.9 for share in shares)


@pytest.mark.parametrize("mode", AGGREGATED)
def test_an_aggregation_is_its_formula_over_the_mini_batch(flow: Flow, mode: str):
    # Mutations caught: counts of the microbatch, or of the batch; the completion's own length as the constant; a failed
    # rollout in the denominator.
    scenario = SCENARIOS[mode]
    found, _ = flow.train(scenario, "pieces")
    expected = plain_training(
        flow.model_path,
        flow.halves,
        lambda now, before, a: AGGREGATED[mode](now, clipped(now, before.logprobs, a) * tis(before)),
        num_epochs=2,
        lr=scenario.lr,
    )
    assert_trained(flow, found, expected)


def test_good_answers_are_imitated_besides(flow: Flow):
    # Mutations caught: all tokens in the denominator; the answers above the group's mean.
    found, metrics = flow.train(SCENARIOS["positive"], "pieces")

    def loss(now: PlainBatch, before: PlainBatch, a: Tensor) -> Tensor:
        good = torch.tensor([now.rewards[row] > 0 for row in now.trajectory.tolist()])
        return default_loss(now, before, a) - 0.2 * now.logprobs[good].mean()

    assert_trained(flow, found, plain_training(flow.model_path, flow.halves, loss, num_epochs=2, lr=0.05))
    assert metrics["actor/positive_loss"] > 0


def test_a_loss_and_advantages_of_ones_own_are_trained(flow: Flow):
    # Mutation caught: options that do not reach the functions.
    found, _ = flow.train(SCENARIOS["custom"], "pieces")
    expected = plain_training(
        flow.model_path,
        flow.halves,
        lambda now, before, a: (-2.0 * a * now.logprobs * tis(before)).mean(),
        advantages=lambda batch: (
            torch.tensor([batch.rewards[row] for row in batch.trajectory.tolist()]) - 0.5
        ),
        num_epochs=2,
        lr=0.05,
    )
    assert_trained(flow, found, expected)


def test_an_entropy_bonus_has_the_gradient_of_the_entropy(flow: Flow):
    # Mutations caught: the entropy without its gradient; a penalty.
    found, metrics = flow.train(SCENARIOS["entropy"], "pieces")
    expected = plain_training(
        flow.model_path,
        flow.halves,
        lambda now, before, a: (clipped(now, before.logprobs, a) * tis(before) - 0.2 * now.entropy).mean(),
        num_epochs=2,
        lr=0.05,
    )
    assert_trained(flow, found, expected)
    assert metrics["actor/entropy_loss"] == pytest.approx(-0.2 * metrics["actor/entropy"], rel=0.05)


@pytest.mark.parametrize(
    ("name", "divisor"),
    [
        ("kept-token-mean", lambda b, kept: kept.sum()),
        ("kept-token-sum", lambda b, kept: 1),
        ("kept-seq-mean-token-sum", lambda b, kept: b.num_scored),
        ("kept-by-number", lambda b, kept: 5.0),
        ("kept-at-least", lambda b, kept: 30.0),
    ],
)
def test_rejected_tokens_leave_the_denominator_that_is_known_afterwards(flow: Flow, name: str, divisor: Any):
    # Mutations caught: all tokens in the denominator; one of a microbatch; dividing twice by a number, or by
    # at_least; a scale that the learning rate swallows (AdamW), which SGD does not.
    scenario = SCENARIOS[name]
    found, metrics = flow.train(scenario, "pieces")

    def loss(now: PlainBatch, before: PlainBatch, a: Tensor) -> Tensor:
        kept = kept_by_k3(before)
        return (clipped(now, before.logprobs, a) * tis(before) * kept).sum() / divisor(now, kept)

    assert_trained(flow, found, plain_training(flow.model_path, flow.halves, loss, num_epochs=2, lr=0.05))
    assert 0.1 < metrics["correction/rejected_share"] < 0.9


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"])
def test_a_mean_over_trajectories_or_prompts_is_over_the_tokens_that_are_kept(flow: Flow, mode: str):
    # Mutations caught: a trajectory's (a group's) mean with its rejected tokens in the denominator; trajectories that
    # lost all tokens left out of their number; groups that did counted.
    rejection = {"statistic": "ratio", "lower": 0.8, "upper": 1.3}
    scenario = Scenario(
        {
            "loss": {"aggregation": {"mode": mode}},
            "correction": {"rejections": [rejection], "denominator": "kept"},
        }
    )
    found, _ = flow.train(scenario, "pieces")
    partly = []

    def loss(now: PlainBatch, before: PlainBatch, a: Tensor) -> Tensor:
        ratio = (before.logprobs - before.rollout).exp()
        kept = (ratio >= 0.8) & (ratio <= 1.3)
        partly.append(any(0 < kept[row].sum() < len(row) for row in now.rows()))
        partly.append(any(len(row) and not kept[row].any() for row in now.rows()))
        of_kept = (clipped(now, before.logprobs, a) * tis(before))[kept]
        return AGGREGATED[mode](replace(now, trajectory=now.trajectory[kept]), of_kept)

    assert_trained(flow, found, plain_training(flow.model_path, flow.halves, loss, num_epochs=2, lr=0.05))
    assert all(partly)


def test_a_batch_of_which_everything_is_rejected_trains_nothing(flow: Flow):
    # Mutations caught: 0 / 0; a step that FSDP's ranks would not take.
    everything = [{"statistic": "ratio", "upper": 1e-9}]
    for denominator in ("kept", "all"):
        found, metrics = flow.train(
            Scenario({"correction": {"rejections": everything, "denominator": denominator}}), "pieces"
        )
        assert_trained(flow, found, dict(plain_model(flow.model_path).named_parameters()))
        assert metrics["actor/grad_norm"] == metrics["actor/pg_loss"] == 0.0
        assert metrics["correction/rejected_share"] == 1.0
        assert all(math.isfinite(value) for value in metrics.values())


def test_a_denominator_that_may_be_0_names_the_rejections_that_made_it_so(flow: Flow):
    # Mutation: leave it to the gradient norm -> "nan (first in the sum over all)", which says nothing of rejections.
    correction = {"rejections": [{"statistic": "ratio", "upper": 1e-9}], "denominator": "kept"}
    scenario = Scenario({"correction": correction, "loss": {"aggregation": {"at_least": 0.0}}})
    with pytest.raises(LearnerError, match=r"rejections reject every token of a mini-batch, .*at_least: 1"):
        flow.train(scenario, "pieces")


def _m2po(halves: list[PlainBatch]) -> list[Tensor]:
    """[half] -> [N] bool: the most tokens of the batch whose mean squared log ratio stays under 0.05."""
    squares = torch.cat([(b.logprobs - b.rollout) ** 2 for b in halves])
    ordered = squares.sort().values
    fits = (ordered.cumsum(0) / torch.arange(1, len(ordered) + 1)) < 0.05
    largest = ordered[int(fits.sum()) - 1]
    return list((squares <= largest).split([len(b.logprobs) for b in halves]))


def test_m2po_cuts_the_whole_batch_at_once(flow: Flow):
    # Mutation caught: the cut of a mini-batch or microbatch alone.
    found, _ = flow.train(SCENARIOS["m2po"], "pieces")
    kept = {len(k): k for k in _m2po(flow.at_start())}

    def loss(now: PlainBatch, before: PlainBatch, a: Tensor) -> Tensor:
        mine = kept[len(a)]
        return clipped(now, before.logprobs, a)[mine].sum() / mine.sum()

    assert_trained(flow, found, plain_training(flow.model_path, flow.halves, loss, num_epochs=2, lr=0.05))
    assert 0 < sum(int(k.sum()) for k in kept.values()) < 36


def test_normalised_weights_have_mean_1_over_the_batch(flow: Flow):
    # Mutation caught: the mean of a mini-batch or microbatch.
    found, _ = flow.train(SCENARIOS["batch_normalize"], "pieces")
    mean = torch.cat([tis(b) for b in flow.at_start()]).mean()
    expected = plain_training(
        flow.model_path,
        flow.halves,
        lambda now, before, a: (clipped(now, before.logprobs, a) * tis(before) / mean).mean(),
        num_epochs=2,
        lr=0.05,
    )
    assert_trained(flow, found, expected)


def test_bypass_compares_with_the_rollout_policy(flow: Flow):
    found, _ = flow.train(SCENARIOS["bypass"], "pieces")
    expected = plain_training(
        flow.model_path,
        flow.halves,
        lambda now, before, a: clipped(now, before.rollout, a).mean(),
        num_epochs=2,
        lr=0.05,
    )
    assert_trained(flow, found, expected)


def test_log_linear_lies_between_rollout_and_learner_by_the_tokens_age(flow: Flow):
    # Mutation caught: the version that is made instead of the one that trains.
    found, _ = flow.train(SCENARIOS["log_linear"], "pieces")

    def loss(now: PlainBatch, before: PlainBatch, a: Tensor) -> Tensor:
        age = (INDEX - now.versions).float()
        proximal = torch.lerp(now.rollout, now.logprobs.detach(), age / (age + 1))
        weight = (proximal - now.rollout).exp().clamp(max=2.0)
        return (clipped(now, proximal, a) * weight).mean()

    assert_trained(flow, found, plain_training(flow.model_path, flow.halves, loss, num_epochs=2, lr=0.05))


def test_the_mismatch_is_reported_by_the_tokens_age(flow: Flow):
    # Mutations caught: the age of the trajectory; older tokens left out instead of in the last bucket.
    _, metrics = flow.train(Scenario({}, num_epochs=1, max_staleness=1), "pieces")
    batches = flow.at_start()
    log_ratio = torch.cat([b.logprobs - b.rollout for b in batches])
    age = INDEX - torch.cat([b.versions for b in batches])
    assert set(age.tolist()) == {0, 1, 2}
    for bucket, of_age in ((0, age == 0), (1, age >= 1)):
        assert metrics[f"mismatch/k1/staleness_{bucket}"] == pytest.approx(
            -float(log_ratio[of_age].mean()), abs=1e-5
        )
    assert "mismatch/k1/staleness_2" not in metrics


def test_no_step_is_taken_once_the_kl_is_over_its_target(flow: Flow):
    # Mutations caught: the step that showed it taken all the same; gradients left for the next batch; k1's sign.
    found, metrics = flow.train(SCENARIOS["target_kl"], "pieces")
    model, target = plain_model(flow.model_path), 1.5 * 2e-4
    before = flow.at_start()
    num_steps = 0
    for _ in range(3):
        for half, old in zip(flow.halves, before, strict=True):
            now = plain_batch(model, half, 0.7)
            if float((old.logprobs - now.logprobs.detach()).mean()) > target:
                break
            default_loss(now, old, grpo_advantages(old)).backward()
            sgd(model.parameters(), 0.05)
            num_steps += 1
        else:
            continue
        break
    assert 0 < num_steps < 6
    assert metrics["actor/early_stopped"] == 1.0
    assert_trained(flow, found, {name: p.detach() for name, p in model.named_parameters()})
