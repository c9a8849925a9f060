"""Policy losses by hand, value and gradient, family by family."""

from __future__ import annotations

import math

import pytest
import torch

from asyncrl.algorithms.losses import clipped_surrogate, importance_ratio
from asyncrl.algorithms.losses.cispo import cispo_loss
from asyncrl.algorithms.losses.covariance import (
    clip_cov_selection,
    covariances,
    kl_cov_loss,
    kl_cov_selection,
)
from asyncrl.algorithms.losses.dppo import masked_ratio_loss, near_in_probability, within_trust_region
from asyncrl.algorithms.losses.entropy import sampled_entropy_term, top_entropy_tokens
from asyncrl.algorithms.losses.reinforce import dro_loss, importance_weighted_loss, reinforce_loss
from asyncrl.algorithms.losses.sapo import soft_gated_loss
from asyncrl.algorithms.losses.sequence import (
    gamma_weights,
    geometric_mean_surrogate,
    vespo_loss,
)
from asyncrl.algorithms.segments import Segments

LOG2 = math.log(2.0)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def value_and_gradient(loss_of, *leaves):
    """(loss [N] as a list, gradient of its sum with respect to the first leaf)."""
    leaf = tensor(leaves[0]).requires_grad_()
    loss = loss_of(leaf, *[tensor(values) for values in leaves[1:]])
    loss.sum().backward()
    assert leaf.grad is not None
    return loss.tolist(), leaf.grad.tolist()


def test_dual_clip_bounds_the_loss_of_bad_answers_only():
    # Mutations caught: the bound for A > 0 too; maximum for minimum; the bound without the gradient's cut.
    def loss(ratio, advantages):
        return clipped_surrogate(ratio, advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0).loss

    values, gradients = value_and_gradient(loss, [5.0, 2.0, 5.0], [-1.0, -1.0, 1.0])
    assert values == [3.0, 2.0, -1.2]
    assert gradients == [0.0, 1.0, 0.0]
    flags = clipped_surrogate(
        tensor([5.0, 2.0]), tensor([-1.0, -1.0]), clip_low=0.2, clip_high=0.2, dual_clip=3.0
    )
    assert flags.diagnostics["pg_clipfrac_lower"].tolist() == [True, False]


def test_the_bound_on_the_free_ratio_holds_for_either_sign():
    # Mutation caught: the bound also in the clipped branch.
    loss = clipped_surrogate(
        tensor([5.0, 1.15]), tensor([-1.0, 1.0]), clip_low=0.2, clip_high=0.2, max_ratio=1.1
    ).loss
    assert loss.tolist() == [1.2, -1.1]


def test_a_sequence_ratio_is_the_exponential_of_the_mean():
    # Mutations caught: the sum, the mean of exponentials, the mean over the batch.
    segments = Segments.of_counts([2, 0, 1])
    learner = tensor([LOG2, 3 * LOG2, -LOG2])
    ratio = importance_ratio(learner, torch.zeros_like(learner), segments, level="sequence")
    assert ratio.tolist() == pytest.approx([4.0, 4.0, 0.5])
    total = importance_ratio(learner, torch.zeros_like(learner), segments, level="sequence_sum")
    assert total.tolist() == pytest.approx([16.0, 16.0, 0.5])


def test_the_token_form_of_a_sequence_ratio_passes_each_token_its_own_gradient():
    # Mutation caught: one form for the other: they differ only where advantages differ within a trajectory.
    segments = Segments.of_counts([2])

    def loss(level):
        return lambda learner, advantages: (
            -importance_ratio(learner, torch.zeros_like(learner), segments, level=level) * advantages
        )

    plain = value_and_gradient(loss("sequence"), [LOG2, 3 * LOG2], [1.0, 0.0])
    token = value_and_gradient(loss("sequence_token"), [LOG2, 3 * LOG2], [1.0, 0.0])
    assert plain == (pytest.approx([-4.0, 0.0]), pytest.approx([-2.0, -2.0]))
    assert token == (pytest.approx([-4.0, 0.0]), pytest.approx([-4.0, 0.0]))


def test_cispo_weighs_the_log_prob_and_never_stops_a_token():
    # Mutations caught: a gradient through the ratio (TorchRL), the bound as a distance from 1 (TRL's is the ratio).
    def loss(outside):
        return lambda learner, advantages: (
            cispo_loss(
                (learner + LOG2).exp(), learner, advantages, ratio_min=0.5, ratio_max=1.5, outside=outside
            ).loss
        )

    values, gradients = value_and_gradient(loss("clip"), [0.0, -LOG2, -1.0], [2.0, 1.0, 1.0])
    assert gradients == pytest.approx([-3.0, -1.0, -2 * math.exp(-1)])
    assert values == pytest.approx([0.0, LOG2, 2 * math.exp(-1)])
    assert value_and_gradient(loss("zero"), [0.0, -LOG2], [2.0, 1.0])[1] == pytest.approx([0.0, -1.0])


def test_sapo_has_the_gradient_of_the_ratio_at_one_and_fades_away_from_it():
    # Mutations caught: 4 / tau without the 4, the taus of the two signs swapped.
    def loss(ratio, advantages):
        return soft_gated_loss(ratio, advantages, tau_positive=1.0, tau_negative=2.0).loss

    values, gradients = value_and_gradient(loss, [1.0, 1.0, 3.0], [1.0, -1.0, 1.0])
    assert values == pytest.approx([-2.0, 1.0, -4 / (1 + math.exp(-2))])
    assert gradients[:2] == pytest.approx([-1.0, 1.0])
    assert -0.5 < gradients[2] < 0.0


def test_dppo_goes_by_probabilities_and_by_the_direction_of_the_push():
    # Mutations caught: ratios for probabilities; the two deltas swapped; a token masked that is on its way back.
    learner = tensor([0.5, 0.5, 0.01, 0.3]).log()
    anchor = tensor([0.3, 0.3, 0.001, 0.5]).log()
    keep = within_trust_region(learner, anchor, tensor([1.0, -1.0, 1.0, -1.0]), delta_low=0.3, delta_high=0.1)
    assert keep.tolist() == [False, True, True, True]
    coming_back = within_trust_region(
        learner, anchor, tensor([-1.0, -1.0, -1.0, 1.0]), delta_low=0.0, delta_high=0.0
    )
    assert coming_back.all()
    assert near_in_probability(learner, anchor, threshold=0.1).tolist() == [False, False, True, False]
    # KL of Bernoulli(0.3) to Bernoulli(0.5) is 0.082.
    for delta, kept in ((0.08, False), (0.09, True)):
        keep = within_trust_region(
            learner[:1], anchor[:1], tensor([1.0]), divergence="kl", delta_low=9.0, delta_high=delta
        )
        assert keep.tolist() == [kept]


def test_a_bounded_ratio_keeps_its_gradient_in_the_score_function_form():
    # Mutation caught: one form for the other.
    keep = torch.tensor([True, False])

    def loss(score_function):
        return lambda learner, advantages: (
            masked_ratio_loss(
                (learner + LOG2).exp(),
                learner,
                advantages,
                keep,
                max_ratio=1.5,
                score_function=score_function,
            ).loss
        )

    assert value_and_gradient(loss(False), [0.0, 0.0], [1.0, 1.0]) == ([-1.5, 0.0], [0.0, 0.0])
    assert value_and_gradient(loss(True), [0.0, 0.0], [1.0, 1.0])[1] == [-1.5, 0.0]


def test_gmpo_by_hand():
    # Mutations caught: the clip on the wrong side, one clip of the mean, an arithmetic mean of ratios.
    segments = Segments.of_counts([2, 1])

    def loss(learner, advantages):
        return geometric_mean_surrogate(
            learner, torch.zeros_like(learner), advantages, segments, clip_low=0.4, clip_high=0.6
        ).loss

    values, gradients = value_and_gradient(loss, [1.0, -1.0, -1.0], [1.0, 1.0, -2.0])
    first = math.exp((0.6 - 1.0) / 2)
    assert values == pytest.approx([-first, -first, 2 * math.exp(-0.4)])
    assert gradients == pytest.approx([0.0, -first, 0.0])


def test_vespo_weighs_with_the_gamma_kernel():
    # Mutations caught: not 1 at ratio 1, the parameters of the two signs swapped, a gradient through phi.
    segments = Segments.of_counts([2, 1])
    log_ratio = tensor([LOG2 / 2, LOG2 / 2, 0.0])
    phi = gamma_weights(log_ratio.requires_grad_(), tensor([-1.0, -1.0, 1.0]), segments)
    assert not phi.requires_grad
    assert phi.tolist() == pytest.approx([math.exp(2) * 8 * math.exp(-4)] * 2 + [1.0])
    values, gradients = value_and_gradient(
        lambda learner, advantages: vespo_loss(learner, advantages, phi).loss,
        [-1.0, -1.0, -2.0],
        [0.0, 0.0, 3.0],
    )
    assert (values, gradients) == ([0.0, 0.0, 6.0], [0.0, 0.0, -3.0])


def test_reinforce_importance_weighted_and_dro_by_hand():
    # Mutations caught: the sign; beta without the half; the anchor's log-prob for the learner's.
    assert value_and_gradient(lambda lp, a: reinforce_loss(lp, a).loss, [-2.0], [3.0]) == ([6.0], [-3.0])
    values, gradients = value_and_gradient(lambda r, a: importance_weighted_loss(r, a).loss, [2.0], [3.0])
    assert (values, gradients) == ([-6.0], [-3.0])
    values, gradients = value_and_gradient(
        lambda lp, q, a: dro_loss(lp, q, a, beta=0.5).loss, [-2.0], [-3.0], [3.0]
    )
    assert (values, gradients) == ([6.25], [-2.5])


def test_covariances_and_what_they_select():
    # Mutations caught: means not removed, the smallest selected, a share of the candidates and not of all tokens.
    learner, advantages = tensor([-1.0, -2.0, -3.0, -2.0]), tensor([2.0, 0.0, -2.0, 0.0])
    covariance = covariances(learner, advantages)
    assert covariance.tolist() == [2.0, 0.0, 2.0, 0.0]
    assert kl_cov_selection(tensor([1.0, 5.0, 3.0, 0.0]), share=0.5).tolist() == [False, True, True, False]
    assert kl_cov_selection(covariance, share=1e-9).sum() == 1
    clipped = torch.tensor([True, False, False, False])
    chosen = clip_cov_selection(covariance, clipped, share=1.0, lowest=1.0, highest=5.0)
    assert chosen.tolist() == [False, False, True, False]
    loss = kl_cov_loss(
        tensor([2.0, 2.0]), tensor([-1.0, -1.0]), tensor([1.0, 1.0]), torch.tensor([True, False]), coef=0.5
    )
    assert loss.loss.tolist() == [-1.5, -2.0]


def test_the_draw_of_clip_cov_repeats_with_its_generator():
    # Mutation caught: the global generator.
    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return clip_cov_selection(
            torch.ones(50),
            torch.zeros(50, dtype=torch.bool),
            share=0.1,
            lowest=0.0,
            highest=2.0,
            generator=generator,
        )

    assert draw(1).sum() == 5
    assert draw(1).equal(draw(1))
    assert not draw(1).equal(draw(2))


def test_entropy_by_hand():
    # Mutations caught: the share of tokens that are dropped; p log p without its sign.
    assert top_entropy_tokens(tensor([0.1, 0.4, 0.2, 0.3, 0.5]), share=0.2).tolist() == [False] * 4 + [True]
    assert top_entropy_tokens(torch.empty(0), share=0.2).tolist() == []


@pytest.mark.parametrize("share", [1 / 64, 0.125, 0.25, 0.37, 0.5, 0.75, 1.0])
def test_the_top_entropy_tokens_are_those_at_or_above_torchs_quantile(share):
    # Mutations caught: floor or round for ceil; n for n - 1; > for >=, which leaves out ties.
    generator = torch.Generator().manual_seed(3)
    for num_tokens in (1, 2, 3, 9, 10, 102, 1000):
        entropy = torch.rand(num_tokens, generator=generator, dtype=torch.float64)
        for values in (entropy, (4 * entropy).round()):
            expected = values >= torch.quantile(values, 1.0 - share)
            assert torch.equal(top_entropy_tokens(values, share=share), expected), num_tokens


def test_rounding_costs_no_top_entropy_token():
    # Mutation caught: (1 - 0.7) * 10 = 3.0000000000000004 taken as beyond 3, as torch.quantile does.
    assert int(top_entropy_tokens(torch.arange(11.0), share=0.7).sum()) == 8


def test_the_top_entropy_tokens_of_more_values_than_torchs_quantile_takes():
    # Mutation caught: torch.quantile, which refuses more than 2^24.
    num_tokens = 2**24 + 1
    top = top_entropy_tokens(torch.arange(num_tokens) / num_tokens, share=0.25)
    assert int(top.sum()) == 2**22 + 1
    assert bool(top[3 * 2**22 :].all())
    assert sampled_entropy_term(tensor([-LOG2])).tolist() == pytest.approx([LOG2 / 2])
