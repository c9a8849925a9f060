"""The stages of a configured estimator, in the order in which a learner rank runs them.

1. `trajectory_advantages`: from the rewards of the whole batch (every rank has them).
2. `token_advantages`, or `critic_advantages`, `token_baseline_advantages`: for this rank's tokens.
3. `whitened(config.token_whitening, ...)` (of a critic, `config.whiten`): with the moments of all ranks' tokens,
   `Moments.of(values).sums` all-reduced.
"""

from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.advantages.components import component_advantages
from asyncrl.algorithms.advantages.credit import minus_kl, token_rewards
from asyncrl.algorithms.advantages.gae import generalised_advantages, length_adaptive_lambda
from asyncrl.algorithms.advantages.outcome import outcome_advantages
from asyncrl.algorithms.advantages.pass_at_k import pass_at_k_advantages
from asyncrl.algorithms.advantages.returns import rewards_to_go
from asyncrl.algorithms.advantages.token_baseline import optimal_token_baselines
from asyncrl.algorithms.advantages.whitening import Moments, whiten
from asyncrl.algorithms.segments import Segments
from asyncrl.config.advantages import (
    ComponentAdvantages,
    GaeAdvantages,
    OutcomeAdvantages,
    PassAtKAdvantages,
    TokenBaselineAdvantages,
    Whitened,
    Whitening,
)


def trajectory_advantages(
    config: OutcomeAdvantages | PassAtKAdvantages,
    rewards: Tensor,
    group_index: Tensor,
    *,
    lengths: Tensor | None = None,
    greedy_rewards: Tensor | None = None,
) -> Tensor:
    """rewards [R] of the whole batch, NaN where there is none -> [R]. lengths: trained tokens, [R]."""
    if isinstance(config, PassAtKAdvantages):
        return pass_at_k_advantages(
            rewards, group_index, divide_by_std=config.divide_by_std, epsilon=config.epsilon
        )
    advantages = outcome_advantages(
        rewards,
        group_index,
        baseline=config.baseline,
        baseline_over=config.baseline_over,
        scale=config.scale,
        scale_over=config.scale_over,
        deviation=config.deviation,
        deviation_around=config.deviation_around,
        epsilon=config.epsilon,
        epsilon_form=config.epsilon_form,
        group_of_one=config.group_of_one,
        lengths=lengths,
        greedy_rewards=greedy_rewards,
    )
    return _over_trajectories(config, advantages, ~rewards.isnan())


def summed_component_advantages(
    config: ComponentAdvantages, components: Tensor, group_index: Tensor, weights: list[float] | None = None
) -> Tensor:
    """components [C, R] of the whole batch, NaN where a reward does not apply; weights [C] -> [R].

    Whitened here under `whiten_over: trajectories`; over tokens it is left for `whitened`.
    """
    advantages = component_advantages(
        components,
        group_index,
        weights=weights,
        baseline=config.baseline,
        scale=config.scale,
        deviation=config.deviation,
        epsilon=config.epsilon,
        epsilon_form=config.epsilon_form,
        group_of_one=config.group_of_one,
    )
    return _over_trajectories(config, advantages, ~components.isnan().all(0))


def _over_trajectories(config: Whitened, advantages: Tensor, scored: Tensor) -> Tensor:
    """`whiten_over: trajectories`, of those that have a reward."""
    whitening = config.trajectory_whitening
    return whitened(whitening, advantages, Moments.of(advantages[scored])).where(scored, 0.0)


def token_advantages(
    config: OutcomeAdvantages,
    advantages: Tensor,
    segments: Segments,
    *,
    positions: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float | Tensor = 0.0,
) -> Tensor:
    """advantages [R] of this rank's trajectories -> [N], with the KL penalty kl_coef * kl [N] where it is asked for."""
    if config.gamma == 1 and config.gaps != "cut" and kl is None:
        return segments.spread(advantages)
    if config.kl_credit == "own_token":
        spread = segments.spread(advantages)
        return spread if kl is None else minus_kl(spread, kl, kl_coef)
    rewards = token_rewards(advantages, segments, kl=kl, kl_coef=kl_coef)
    return rewards_to_go(rewards, segments, gamma=config.gamma, gaps=config.gaps, positions=positions)


def critic_advantages(
    config: GaeAdvantages,
    rewards: Tensor,
    values: Tensor,
    segments: Segments,
    *,
    positions: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), [N] each, before whitening; returns are the critic's targets."""

    def estimate(lam: float | Tensor) -> Tensor:
        return generalised_advantages(
            rewards,
            values,
            segments,
            gamma=config.gamma,
            lam=lam,
            gaps=config.gaps,
            positions=positions,
            bootstrap_values=bootstrap_values,
        )

    alpha = config.length_adaptive_alpha
    advantages = estimate(length_adaptive_lambda(segments, alpha) if alpha > 0 else config.lam)
    if config.lam_value is None and alpha == 0:
        return advantages, advantages + values.detach()
    return advantages, values.detach() + estimate(
        config.lam if config.lam_value is None else config.lam_value
    )


def token_baseline_advantages(
    config: TokenBaselineAdvantages,
    rewards: Tensor,
    logprobs: Tensor,
    sum_pi_squared: Tensor,
    segments: Segments,
    group_index: Tensor,
    *,
    weights: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), [N] each, from token rewards [N]. Groups must be whole on a rank."""
    returns = rewards_to_go(rewards, segments)
    baselines = optimal_token_baselines(
        returns,
        logprobs,
        sum_pi_squared,
        segments,
        group_index,
        weights=weights,
        zero_tail=config.zero_tail,
        positions=positions if config.steps == "all" else None,
        epsilon=config.epsilon,
    )
    return returns - baselines, returns


def whitened(config: Whitening | None, values: Tensor, moments: Moments) -> Tensor:
    """values as they are without a table."""
    if config is None:
        return values
    return whiten(
        values,
        moments,
        shift_mean=config.shift_mean,
        deviation=config.deviation,
        epsilon=config.epsilon,
        epsilon_in=config.epsilon_in,
    )
