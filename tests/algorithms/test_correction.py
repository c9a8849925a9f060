"""Off-policy correction: values worked out by hand, and what holds for any tokens and any split of them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from math import exp, inf, isnan, log, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from asyncrl.algorithms.correction import Policies, correct, log_linear_proximal, report
from asyncrl.algorithms.segments import Segments
from asyncrl.config.correction_presets import CORRECTION_PRESETS
from asyncrl.config.corrections import OffPolicyCorrection

KEEP = {"weight": None}


def corrected(ratios, counts, *, advantages=None, learner=None, **options):
    """Of tokens with these ratios proximal / rollout, in trajectories of `counts` tokens."""
    proximal = torch.tensor([log(ratio) for ratio in ratios], dtype=torch.float64)
    rollout = torch.full_like(proximal, -1.0)
    policies = Policies(proximal - 1.0 if learner is None else learner, proximal - 1.0, rollout)
    advantages = None if advantages is None else torch.tensor(advantages)
    return correct(
        policies, Segments.of_counts(counts), OffPolicyCorrection(**options), advantages=advantages
    )


# The weight


@pytest.mark.parametrize(
    ("level", "outside", "expected"),
    [
        ("token", "truncate", [2.0, 1.0, 1.5, 0.25]),  # mutations: either bound left out
        ("token", "zero", [0.0, 1.0, 1.5, 0.0]),  # mutation: a ratio on the bound zeroed
        ("sequence", "truncate", [2.0, 2.0, 0.3, 0.3]),  # mutation: one product for all trajectories
        ("geometric", "truncate", [2.0, 2.0, 0.3**0.5, 0.3**0.5]),  # mutation: the arithmetic mean
    ],
)
def test_weights_at_each_level(level, outside, expected):
    lower = 0.25 if outside == "truncate" else 1.0
    weight = {"level": level, "outside": outside, "lower": lower, "upper": 2.0}
    found = corrected([4.0, 1.0, 1.5, 0.2], [2, 2], weight=weight)
    assert found.weights.tolist() == pytest.approx(expected)
    assert found.kept.all()


def test_a_weight_carries_no_gradient():
    # Mutation: policies.pair without detach.
    learner = torch.zeros(2, requires_grad=True)
    policies = Policies(learner, learner, torch.full((2,), -0.1))
    for proximal in ("recompute", "bypass"):
        found = correct(policies, Segments.of_counts([2]), OffPolicyCorrection(proximal=proximal))
        assert not found.weights.requires_grad


def test_bypass_corrects_to_the_learner():
    # Mutation: the proximal policy, which is the rollout policy here, so that every weight would be 1.
    rollout = torch.tensor([-1.0])
    policies = Policies(rollout + log(1.5), rollout, rollout)
    for proximal, weight in (("bypass", 1.5), ("recompute", 1.0)):
        found = correct(policies, Segments.of_counts([1]), OffPolicyCorrection(proximal=proximal))
        assert float(found.weights) == pytest.approx(weight)


def test_batch_normalisation_is_over_tokens_or_trajectories():
    # Tokens: mean of 2, 2, 2, 0.5 = 1.625. Trajectories: products 2 (cut from 8) and 0.5, mean 1.25.
    # Mutation: the mean over tokens for both, which gives 1.625 for the second one too.
    ratios, counts = [2.0, 2.0, 2.0, 0.5], [3, 1]
    for level, mean in (("token", 1.625), ("sequence", 1.25)):
        found = corrected(ratios, counts, weight={"level": level, "batch_normalize": True})
        assert found.weights.tolist() == pytest.approx([2 / mean] * 3 + [0.5 / mean])


# The log-linear proximal policy


def test_log_linear_proximal_is_the_rollout_policy_for_its_own_version_and_nears_the_learner_with_age():
    # Learner 0, rollout -1: -1 + age / (age + 1). Mutation: age - 1 in the numerator (AReaL's v_theta is v + 1 here).
    learner, rollout = torch.zeros(4, requires_grad=True), torch.full((4,), -1.0)
    found = log_linear_proximal(learner, rollout, torch.tensor([7, 6, 5, 3]), proximal_version=7)
    assert found.tolist() == pytest.approx([-1.0, -1 / 2, -1 / 3, -1 / 5])
    assert not found.requires_grad


# Rejection

RATIOS, COUNTS = [1.0, 1.5, 0.8, 1.0, 3.0, 0.4], [3, 3]  # products 1.2, 1.2; means exp(log(1.2) / 3) = 1.0627


@pytest.mark.parametrize(
    ("rejection", "kept"),
    [
        ({"over": "token", "lower": 0.8, "upper": 1.5}, [1, 1, 1, 1, 0, 0]),  # mutation: < for <=
        ({"over": "token", "upper": 1.2}, [1, 0, 1, 1, 0, 1]),  # mutation: a lower bound of 1 / upper
        ({"over": "any", "lower": 0.5}, [1, 1, 1, 0, 0, 0]),  # mutation: the largest token for both bounds
        ({"over": "any", "upper": 2.0}, [1, 1, 1, 0, 0, 0]),
        ({"over": "max", "lower": 2.0}, [0, 0, 0, 1, 1, 1]),  # mutation: any token under 2
        (
            {"over": "sum", "upper": 1.19},
            [0, 0, 0, 0, 0, 0],
        ),  # mutation: the sum of ratios against the bound's log
        ({"over": "sum", "upper": 1.21}, [1, 1, 1, 1, 1, 1]),
        ({"over": "mean", "lower": 1.06, "upper": 1.07}, [1, 1, 1, 1, 1, 1]),
        (
            {"statistic": "k1", "over": "token", "upper": 0.5},
            [1, 1, 1, 1, 1, 0],
        ),  # -log 0.4; mutation: +log ratio
        (
            {"statistic": "k2", "over": "token", "upper": 0.5},
            [1, 1, 1, 1, 0, 1],
        ),  # 0.60, 0.42; mutation: no half
        ({"statistic": "k3", "over": "token", "upper": 0.35}, [1, 1, 1, 1, 0, 1]),  # 0.90, 0.32
        ({"statistic": "reverse_k3", "over": "token", "upper": 0.5}, [1, 1, 1, 1, 1, 0]),  # 0.43, 0.58
        (
            {"statistic": "ratio_deviation", "over": "mean", "upper": 0.5},
            [1, 1, 1, 0, 0, 0],
        ),  # 0.7 / 3, 2.6 / 3
        (
            {"statistic": "multiplicative_error", "over": "token", "upper": 2.2},
            [1, 1, 1, 1, 0, 0],
        ),  # 3 and 1 / 0.4
        ({"statistic": "probability_difference", "over": "token", "lower": -0.1}, [1, 1, 1, 1, 1, 0]),
        ({"over": "token"}, [1, 1, 1, 1, 1, 1]),  # without bounds it only reports
    ],
)
def test_each_criterion(rejection, kept):
    found = corrected(RATIOS, COUNTS, **KEEP, rejections=(rejection,))
    assert found.kept.tolist() == [bool(k) for k in kept]
    assert found.weights.tolist() == kept  # mutation: rejected tokens keep their weight


def test_only_some_tokens_may_be_rejected():
    # Trajectory 2 is out of bounds. Mutations: positive advantages; (log r) * A < 0.
    criterion = {"statistic": "ratio_deviation", "over": "mean", "upper": 0.5}
    found = corrected(
        RATIOS,
        COUNTS,
        **KEEP,
        advantages=[-1.0] * 5 + [1.0],
        rejections=(criterion | {"only": "negative_advantage"},),
    )
    assert found.kept.tolist() == [True, True, True, False, False, True]
    # Log ratios 0, log 3, log 0.4: with A = 1 the second moves away, with A = -1 the third would.
    for advantage, kept in ((1.0, [True, False, True]), (-1.0, [True, True, False])):
        found = corrected(
            RATIOS,
            COUNTS,
            **KEEP,
            advantages=[advantage] * 6,
            rejections=(criterion | {"only": "diverging"},),
        )
        assert found.kept.tolist() == [True] * 3 + kept
    with pytest.raises(ValueError, match="needs the advantages"):
        corrected(RATIOS, COUNTS, rejections=(criterion | {"only": "diverging"},))


def test_in_order_a_criterion_sees_what_the_ones_before_kept():
    # The token of ratio 3 goes first; the second trajectory's product is then 0.4, out of [0.5, 2], against 1.2.
    # Mutation: in_order ignored, or the weight's product over all tokens (1.2 for the second trajectory).
    criteria = ({"over": "token", "upper": 2.0}, {"over": "sum", "lower": 0.5, "upper": 2.0})
    weight = {"level": "sequence", "upper": None}
    found = corrected(RATIOS, COUNTS, weight=weight, rejections=criteria)
    assert found.weights.tolist() == pytest.approx([1.2, 1.2, 1.2, 1.2, 0, 1.2])
    found = corrected(RATIOS, COUNTS, weight=weight, rejections=criteria, in_order=True)
    assert found.weights.tolist() == pytest.approx([1.2, 1.2, 1.2, 0, 0, 0])
    found = corrected(RATIOS, COUNTS, weight=weight, rejections=criteria[:1], in_order=True)
    assert found.weights.tolist() == pytest.approx([1.2, 1.2, 1.2, 0.4, 0, 0.4])


def test_whether_rejected_tokens_count_in_the_denominator_is_an_option():
    criterion = {"over": "token", "upper": 2.0}
    for denominator, count in (("all", 6), ("kept", 5)):
        found = corrected(RATIOS, COUNTS, rejections=(criterion,), denominator=denominator)
        assert int(found.counted.sum()) == count
        assert int(found.kept.sum()) == 5


def test_learner_and_proximal_policies_can_be_compared():
    # Mutation: corrected against rollout, whatever `between` says: equal policies here.
    criterion = {"statistic": "k1", "over": "mean", "upper": 0.1, "between": "learner_proximal"}
    learner = torch.tensor([-1.0, -1.0, -1.5, -1.5], dtype=torch.float64)
    found = corrected([1.0] * 4, [2, 2], learner=learner, **KEEP, rejections=(criterion,))
    assert found.kept.tolist() == [True, True, False, False]


# M2PO


def within_by_hand(squares, threshold):
    """The largest number of smallest squares with a mean under the threshold; the smallest alone if there is none."""
    ordered = sorted(squares)
    sizes = [n for n in range(1, len(ordered) + 1) if sum(ordered[:n]) < threshold * n]
    return ordered[max(sizes, default=1) - 1]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30, unique=True), st.floats(0.01, 2.0))
@settings(deadline=None)
def test_m2po_keeps_the_most_tokens_under_the_threshold(tenths, threshold):
    # Mutations: the mean over all tokens instead of those kept; the smallest not kept when all are over.
    squares = [(float(torch.tensor(tenth / 10).float()) ** 2) for tenth in tenths]
    log_ratio = torch.tensor(tenths) / 10
    policies = Policies(log_ratio, log_ratio, torch.zeros_like(log_ratio))
    config = OffPolicyCorrection(preset="m2po", rejections=({"type": "m2po", "threshold": threshold},))
    found = correct(policies, Segments.of_counts([len(tenths)]), config)
    largest = within_by_hand(squares, threshold)
    assert found.kept.tolist() == [square <= largest for square in squares]


def test_m2po_leaves_a_nan_in_the_loss_for_the_gradient_norm_to_refuse():
    log_ratio = torch.tensor([0.1, nan, 0.15, 3.0])
    policies = Policies(log_ratio, log_ratio, torch.zeros(4))
    found = correct(policies, Segments.of_counts([4]), OffPolicyCorrection(preset="m2po"))
    assert found.kept.tolist() == [True, True, True, False]


class Ranks:
    """A sum over threads that stand for ranks."""

    def __init__(self, size):
        self._barrier, self._values = threading.Barrier(size, timeout=20), {}

    def reduce_as(self, rank):
        def all_reduce(tensor):
            self._values[rank] = tensor
            self._barrier.wait()
            total = sum(self._values.values())
            self._barrier.wait()
            return total

        return all_reduce


@pytest.mark.parametrize(
    "options",
    [
        {"preset": "m2po"},
        {"weight": {"level": "token", "batch_normalize": True}},
        {"weight": {"level": "sequence", "batch_normalize": True}},
    ],
)
def test_what_needs_the_whole_batch_is_the_same_on_two_ranks(options):
    # Mutation: all_reduce not called, in within_second_moment or _batch_mean.
    config = OffPolicyCorrection(**options)
    assert config.needs_whole_batch
    policies, segments = random_policies([3, 0, 5, 2, 7, 4], seed=4)
    whole = correct(policies, segments, config)
    parts = [part_of(policies, segments, rows) for rows in ([0, 1, 2], [3, 4, 5])]
    ranks = Ranks(2)
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(correct, *part, config, all_reduce=ranks.reduce_as(rank))
            for rank, part in enumerate(parts)
        ]
        found = [job.result() for job in jobs]
    torch.testing.assert_close(torch.cat([f.weights for f in found]), whole.weights)
    assert torch.cat([f.kept for f in found]).equal(whole.kept)
    assert whole.kept.any()


# Any split of the batch

EVERYTHING = {
    "weight": {"level": "geometric", "lower": 0.5, "upper": 2.0},
    "rejections": (
        {"statistic": "ratio", "over": "token", "lower": 0.3, "upper": 3.0},
        {"statistic": "k3", "over": "mean", "upper": 0.6},
        {"statistic": "ratio", "over": "any", "upper": 5.0},
    ),
}


def random_policies(counts, seed):
    generator = torch.Generator().manual_seed(seed)
    learner, proximal, rollout = (
        -torch.rand(sum(counts), generator=generator, dtype=torch.float64) * 2 for _ in range(3)
    )
    return Policies(learner, proximal, rollout), Segments.of_counts(counts)


def part_of(policies, segments, rows):
    """The trajectories `rows`, in that order."""
    tokens = torch.cat([torch.where(segments.index == row)[0] for row in rows])
    part = Policies(policies.learner[tokens], policies.proximal[tokens], policies.rollout[tokens])
    return part, Segments.of_counts(segments.counts()[rows])


@given(
    counts=st.lists(st.integers(0, 5), min_size=2, max_size=7),
    seed=st.integers(0, 1000),
    in_order=st.booleans(),
    data=st.data(),
)
@settings(deadline=None, max_examples=50)
def test_any_order_and_split_gives_the_same_weights_and_the_same_report(counts, seed, in_order, data):
    # Mutations: a mean instead of a sum in Diagnostics.add_summary; merge that takes the second maximum;
    # means over trajectories weighted by part.
    policies, segments = random_policies(counts, seed)
    config = OffPolicyCorrection(**EVERYTHING, in_order=in_order)
    order = data.draw(st.permutations(range(len(counts))))
    cut = data.draw(st.integers(1, len(counts) - 1))
    whole = correct(*part_of(policies, segments, order), config)
    first, second = (
        correct(*part_of(policies, segments, rows), config) for rows in (order[:cut], order[cut:])
    )
    torch.testing.assert_close(torch.cat([first.weights, second.weights]), whole.weights)
    assert torch.cat([first.kept, second.kept]).equal(whole.kept)
    merged, alone = report(first.diagnostics.merge(second.diagnostics)), report(whole.diagnostics)
    assert merged == pytest.approx(alone, rel=1e-9, abs=1e-7)


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_a_bad_token_touches_no_other_trajectory_and_is_not_hidden(bad):
    # Mutations: nan_to_num in the weights; a NaN counted as out of bounds, which would drop it without a word.
    policies, segments = random_policies([3, 4, 2], seed=1)
    config = OffPolicyCorrection(**EVERYTHING)
    good = correct(policies, segments, config)
    policies.rollout[4] = bad
    found = correct(policies, segments, config)
    others = segments.index != 1
    assert found.weights[others].equal(good.weights[others])
    assert found.kept[others].equal(good.kept[others])
    if isnan(bad):
        assert found.kept[4]
        assert found.weights[found.kept & ~others].isnan().all()
        assert isnan(report(found.diagnostics)["mismatch/k1/mean"])


def test_no_token_and_equal_policies():
    none, segments = random_policies([0, 0], seed=0)
    found = correct(none, segments, OffPolicyCorrection(**EVERYTHING))
    assert found.weights.shape == (0,)
    numbers = report(found.diagnostics)
    assert set(numbers.values()) == {0.0}
    some, segments = random_policies([2, 1], seed=0)
    equal = Policies(some.rollout, some.rollout, some.rollout)
    one = correct(equal, segments, OffPolicyCorrection(**EVERYTHING))
    assert one.weights.tolist() == [1.0, 1.0, 1.0]
    assert set(numbers) == set(report(one.diagnostics))  # the same names, whatever the tokens


def test_the_report_by_hand():
    # Ratios 2 and 0.5 in one trajectory, 1 in the other. Mutations: n for n - 1 in std; ess without squares;
    # chi2 without - 1; shares of trajectories that count tokens.
    criterion = {"over": "token", "upper": 1.5}
    numbers = report(
        corrected([2.0, 0.5, 1.0], [2, 1], weight={"upper": 1.6}, rejections=(criterion,)).diagnostics
    )
    assert numbers["mismatch/k1/mean"] == pytest.approx(0.0)
    assert numbers["mismatch/k3/mean"] == pytest.approx((2 - 1 - log(2) + 0.5 - 1 + log(2)) / 3)
    assert numbers["mismatch/ratio/chi2"] == pytest.approx((4 + 0.25 + 1) / 3 - 1)
    assert numbers["mismatch/logprob_difference/std"] == pytest.approx(log(2) / 3**0.5)
    assert numbers["mismatch/perplexity/mean"] == pytest.approx(exp(1.0))
    assert numbers["weight/bounded/mean"] == pytest.approx((1.6 + 0.5 + 1) / 3)
    assert numbers["weight/bounded/ess"] == pytest.approx(3.1**2 / (3 * (1.6**2 + 0.25 + 1)))
    assert numbers["weight/ratio/above"] == pytest.approx(1 / 3)
    assert numbers["weight/ratio/below"] == pytest.approx(1 / 3)  # under 1 / 1.6
    assert numbers["weight/applied/mean"] == pytest.approx(0.5)
    assert numbers["rejection/rejected_token/mean"] == pytest.approx(1 / 3)
    assert numbers["rejection/rejected_trajectory/mean"] == pytest.approx(1 / 2)
    assert numbers["rejection/token_ratio/trajectory_above/mean"] == pytest.approx(1 / 2)


def test_empty_trajectories_count_only_when_told():
    for count_empty, mean in ((False, 2.0), (True, 1.5)):
        numbers = report(corrected([2.0], [1, 0], weight=None, count_empty=count_empty).diagnostics)
        assert numbers["mismatch/sequence_ratio/mean"] == pytest.approx(mean)


# The configuration


@pytest.mark.parametrize("preset", CORRECTION_PRESETS)
def test_every_preset_is_a_configuration_and_survives_its_own_dump(preset):
    config = OffPolicyCorrection(preset=preset)
    assert OffPolicyCorrection(**config.model_dump()) == config
    assert OffPolicyCorrection.model_validate(config.model_dump(mode="json")) == config


def test_explicit_keys_win_over_the_preset():
    config = OffPolicyCorrection(preset="decoupled_seq_is_rs", weight={"upper": 3.0}, denominator="all")
    assert config.weight is not None
    assert (config.weight.level, config.weight.upper) == (
        "sequence",
        3.0,
    )  # mutation: the whole table replaced
    assert config.denominator == "all"
    assert len(config.rejections) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "nope"}, "no preset 'nope'; there are disabled"),
        ({"weight": {"lower": 3.0}}, "lower 3.0 is above upper 2.0"),
        ({"rejections": [{"lower": 0.0}]}, "bounds of a ratio are above 0"),
        ({"rejections": [{"over": "row"}]}, "over"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValidationError, match=message):
        OffPolicyCorrection(**options)
