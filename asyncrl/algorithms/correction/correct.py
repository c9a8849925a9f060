"""The whole off-policy correction of some tokens: weights, rejection, diagnostics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.correction.diagnostics import Diagnostics, add_mismatch, counted_trajectories
from asyncrl.algorithms.correction.policies import Policies
from asyncrl.algorithms.correction.rejection import Measured, measure, within_second_moment
from asyncrl.algorithms.correction.weights import AllReduce, bounded_weights
from asyncrl.algorithms.segments import Segments
from asyncrl.config.corrections import ImportanceWeight, M2poRejection, OffPolicyCorrection, Rejection


@dataclass(slots=True, frozen=True)
class Correction:
    """What a policy loss takes from the correction; no gradient in any of it."""

    weights: Tensor
    """[N]: multiplies each token's loss; 0 where it is rejected."""
    kept: Tensor
    """[N] bool: not rejected."""
    counted: Tensor
    """[N] bool: counts in the loss's denominator: every token, or those kept (OffPolicyCorrection.denominator)."""
    log_ratio: Tensor
    """[N]: of the corrected policy to the rollout's."""
    diagnostics: Diagnostics

    def part(self, tokens: slice) -> Correction:
        """Of some of the tokens; the diagnostics stay with the whole."""
        return Correction(
            self.weights[tokens],
            self.kept[tokens],
            self.counted[tokens],
            self.log_ratio[tokens],
            Diagnostics(),
        )


def correct(
    policies: Policies,
    segments: Segments,
    config: OffPolicyCorrection,
    *,
    advantages: Tensor | None = None,
    all_reduce: AllReduce = lambda tensor: tensor,
) -> Correction:
    """Off-policy correction of N tokens of R trajectories; a trajectory's tokens must be there all together.

    advantages [N], for criteria that look at them. Where `config.needs_whole_batch`, call it once with this rank's
    share of the whole batch and `all_reduce`; else the result of a token depends on its trajectory alone, and any split
    of the batch gives the same. No token: empty weights, and diagnostics of nothing.
    """
    diagnostics = Diagnostics()
    new, old = policies.pair("corrected_rollout", config.proximal)
    add_mismatch(
        diagnostics, new, old, segments, max_log_ratio=config.max_log_ratio, count_empty=config.count_empty
    )
    everything = torch.ones_like(segments.index, dtype=torch.bool)
    kept = everything
    for rejection, name in zip(config.rejections, _names(config.rejections), strict=True):
        among = kept if config.in_order else everything
        if isinstance(rejection, M2poRejection):
            fits = within_second_moment(new, old, among, threshold=rejection.threshold, all_reduce=all_reduce)
            rejected = among & ~fits
        else:
            measured = measure(
                *policies.pair(rejection.between, config.proximal),
                among,
                segments,
                rejection,
                advantages=advantages,
                max_log_ratio=config.max_log_ratio,
            )
            _add_measured(diagnostics, name, measured, config)
            rejected = measured.rejected
        _add_rejected(diagnostics, name, rejected, among, segments, config)
        kept = kept & ~rejected
    _add_rejected(diagnostics, "rejection", ~kept, everything, segments, config)
    among = kept if config.in_order else everything
    weights = _weights(new - old, among, segments, config, diagnostics, all_reduce)
    weights = torch.where(kept, weights, 0.0)
    diagnostics.add_summary("weight/applied", weights)
    counted = kept if config.denominator == "kept" else everything
    return Correction(weights, kept, counted, new - old, diagnostics)


def _weights(
    log_ratio: Tensor,
    among: Tensor,
    segments: Segments,
    config: OffPolicyCorrection,
    diagnostics: Diagnostics,
    all_reduce: AllReduce,
) -> Tensor:
    """[N], before rejection. Diagnostics are of the weights before batch normalisation."""
    weight = config.weight or ImportanceWeight(lower=None, upper=None)
    if config.weight is None:
        log_ratio = torch.zeros_like(log_ratio)
    found = bounded_weights(
        log_ratio, among, segments, weight, max_log_ratio=config.max_log_ratio, all_reduce=all_reduce
    )
    rows = counted_trajectories(segments, count_empty=config.count_empty)
    # Without a lower bound, ratios are counted as low under 1 / upper: as far from 1 as those counted as high.
    upper = weight.upper
    lower = 1 / upper if weight.lower is None and upper is not None else weight.lower
    diagnostics.add_summary("weight/bounded", found.bounded[among])
    diagnostics.add_summary("weight/bounded_trajectory", segments.mean(found.bounded)[rows])
    diagnostics.add_summary("weight/ratio", found.ratio[among], lower=lower, upper=upper)
    diagnostics.add_summary(
        "weight/ratio_trajectory", segments.mean(found.ratio)[rows], lower=lower, upper=upper
    )
    diagnostics.add_summary("weight/moved", (found.bounded != found.ratio)[among])
    if weight.batch_normalize:
        diagnostics.maxima["weight/normaliser"] = found.normaliser.double()
    return found.bounded / found.normaliser


def _add_measured(
    diagnostics: Diagnostics, name: str, measured: Measured, config: OffPolicyCorrection
) -> None:
    rows = counted_trajectories(measured.segments, count_empty=config.count_empty)
    for whose, values in (("token", measured.tokens), ("trajectory", measured.trajectories[rows])):
        diagnostics.add_summary(f"{name}/{whose}", values, lower=measured.lower, upper=measured.upper)
    diagnostics.add_summary(f"{name}/trajectory_below", measured.below[rows])
    diagnostics.add_summary(f"{name}/trajectory_above", measured.above[rows])


def _add_rejected(
    diagnostics: Diagnostics,
    name: str,
    rejected: Tensor,
    among: Tensor,
    segments: Segments,
    config: OffPolicyCorrection,
) -> None:
    """Shares of tokens, and of trajectories that lose any token, of those that were looked at."""
    diagnostics.add_summary(f"{name}/rejected_token", rejected[among])
    looked_at = Segments(segments.index[among], segments.num_trajectories)
    rows = counted_trajectories(looked_at, count_empty=config.count_empty)
    diagnostics.add_summary(f"{name}/rejected_trajectory", (segments.sum(rejected.int()) > 0)[rows])


def _names(rejections: tuple[Rejection, ...]) -> list[str]:
    """rejection/mean_k1 and so on; a second one of that name is rejection/mean_k1_2."""
    names: list[str] = []
    for rejection in rejections:
        stem = "m2po" if isinstance(rejection, M2poRejection) else f"{rejection.over}_{rejection.statistic}"
        name, number = f"rejection/{stem}", 1
        while name in names:
            number += 1
            name = f"rejection/{stem}_{number}"
        names.append(name)
    return names
