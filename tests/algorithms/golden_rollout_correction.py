"""Off-policy correction of the peers as `OffPolicyCorrection`: weights, masks, and diagnostics by their names here.

verl and SkyRL average some diagnostics over all rows and some over those with tokens; so each case is corrected under
both settings of `count_empty`, and a metric names the one that it is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log
from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms.correction import Correction, Policies, correct, report
from asyncrl.config.corrections import OffPolicyCorrection
from tests.algorithms.goldens import Golden, LeftOut, as_tensor, assert_equal

UNCUT: dict[str, Any] = {"max_log_ratio": None}


def replay(case: Golden) -> None:
    function = case.function.rpartition("::")[2]
    {
        "compute_rollout_correction_and_rejection_mask": _verl,
        "compute_offpolicy_metrics": _verl_mismatch,
        "compute_off_policy_correction": _skyrl,
        "apply_rejection_sampling": _areal,
        "_apply_m2po_masking": _areal_m2po,
        "compute_and_apply_seq_logprob_error_masking": _nemo,
        "compute_rho_correction": _open_instruct,
        "compute_vllm_local_debug_metrics": _open_instruct_debug,
        "compute_train_infer_correction": _roll,
        "vanilla_tis_function": _slime,
        "icepop_function": _slime,
        "compute_opsm_mask": _slime_opsm,
        "GRPOTrainer.get_off_policy_mask": _trl_off_policy_mask,
        "GRPOTrainer._generate_and_score_completions": _trl,
    }[function](case)


@dataclass(frozen=True)
class Found:
    """A case corrected under one configuration."""

    case: Golden
    correction: Correction
    numbers: dict[str, float]
    """`report` with what a metric's name may say before a colon: `all` counts rows without tokens, `n` divides
    deviations by n."""

    def check_weights(self, where: Tensor | None = None) -> None:
        """`is_weights`, (B, T) or (B, 1), at the trained tokens; with `where` [N], at those alone."""
        expected = self.case.output("is_weights").expand(self.case.mask.shape)[self.case.mask]
        where = torch.ones_like(self.correction.kept) if where is None else where
        assert_equal(self.case, "is_weights", self.correction.weights[where], expected[where])

    def check_kept(self, name: str = "mask") -> None:
        expected = self.case.output(name).expand(self.case.mask.shape)[self.case.mask]
        assert_equal(self.case, name, self.correction.kept.to(self.case.dtype), expected)

    def check_metrics(self, names: dict[str, str | float], prefix: str = "") -> None:
        """Every metric of the case: the number of ours that is named, a number, or nothing where it is `inf`."""
        for name, expected in self.case.outputs["metrics"].items():
            ours = names[name.removeprefix(prefix)]
            if ours == inf:
                continue
            number = self.numbers[ours] if isinstance(ours, str) else ours
            assert_equal(self.case, name, torch.tensor(number), as_tensor(expected, self.case.dtype))


NOT_OURS = inf
"""A metric that no number of ours is compared with; each use says why."""


def _correct(case: Golden, *, new: str = "old_log_probs", advantages: bool = False, **options: Any) -> Found:
    config = OffPolicyCorrection(**options)
    old, rollout = case.flat(new), case.flat("rollout_log_probs")
    bypass = config.proximal == "bypass"
    policies = Policies(learner=old, proximal=rollout if bypass else old, rollout=rollout)
    return _found(case, policies, config, case.flat("advantages") if advantages else None)


def _found(case: Golden, policies: Policies, config: OffPolicyCorrection, advantages: Tensor | None) -> Found:
    counting_all = config.model_copy(update={"count_empty": True})
    some, every = (correct(policies, case.segments, c, advantages=advantages) for c in (config, counting_all))
    numbers = report(some.diagnostics)
    numbers |= {f"n:{name}": number for name, number in report(some.diagnostics, sample_std=False).items()}
    numbers |= {f"all:{name}": number for name, number in report(every.diagnostics).items()}
    numbers |= {
        name: float(value) for name, value in some.diagnostics.maxima.items() if name.endswith("normaliser")
    }
    return Found(case, some, numbers)


def _has_empty_rows(case: Golden) -> bool:
    return not bool(case.mask.any(1).all())


# verl

VERL_MISMATCH: dict[str, str | float] = {
    "training_ppl": "all:mismatch/perplexity/mean",
    "training_log_ppl": "all:mismatch/log_perplexity/mean",
    "kl": "mismatch/k1/mean",
    "k3_kl": "mismatch/k3/mean",
    "rollout_ppl": "all:mismatch/rollout_perplexity/mean",
    "rollout_log_ppl": "all:mismatch/rollout_log_perplexity/mean",
    "log_ppl_diff": "all:mismatch/log_perplexity_difference/mean",
    "log_ppl_abs_diff": "all:mismatch/log_perplexity_distance/mean",
    "log_ppl_diff_max": "all:mismatch/log_perplexity_difference/max",
    "log_ppl_diff_min": "all:mismatch/log_perplexity_difference/min",
    "ppl_ratio": "all:mismatch/perplexity_ratio/mean",
    "chi2_token": "mismatch/ratio/chi2",
    "chi2_seq": "all:mismatch/sequence_ratio/chi2",
}
VERL_WEIGHTS: dict[str, str | float] = {
    "rollout_is_mean": "weight/bounded/mean",
    "rollout_is_max": "weight/bounded/max",
    "rollout_is_min": "weight/bounded/min",
    "rollout_is_ratio_fraction_high": "weight/ratio/above",
    "rollout_is_ratio_fraction_low": "weight/ratio/below",
    "rollout_is_std": "n:weight/bounded/std",
    "rollout_is_eff_sample_size": "weight/bounded/ess",
    "rollout_is_seq_mean": "all:weight/bounded_trajectory/mean",
    "rollout_is_seq_std": "all:weight/bounded_trajectory/std",
    "rollout_is_seq_max": "all:weight/bounded_trajectory/max",
    "rollout_is_seq_min": "all:weight/bounded_trajectory/min",
    "rollout_is_seq_fraction_high": "all:weight/ratio_trajectory/above",
    "rollout_is_seq_fraction_low": "all:weight/ratio_trajectory/below",
    "rollout_is_oob_ratio": "weight/moved/mean",
    "rollout_is_batch_norm_factor": "weight/normaliser",
}


def _verl(case: Golden) -> None:
    params = case.params
    options: dict[str, Any] = {"weight": _verl_weight(params), "rejections": _verl_rejections(params)}
    if preset := params.get("preset"):
        options = {"preset": preset} | {key: value for key, value in options.items() if value != ()}
        config = OffPolicyCorrection(preset=preset)
        assert config == OffPolicyCorrection(**options), "the preset is not what verl's parameters say"
        assert (config.proximal == "bypass") == params["bypass_mode"]
        options = {"preset": preset}
    found = _correct(case, **options)
    found.check_kept()
    if case.outputs["is_weights"] is not None:
        _correct(case, **options | {"rejections": ()}).check_weights()
    numbers, names = found.numbers, VERL_MISMATCH | VERL_WEIGHTS
    if params["rollout_is"]:
        name = "all:weight/bounded_trajectory"
        deviation = max(numbers[f"{name}/max"] - 1, 1 - numbers[f"{name}/min"])
        names |= {"rollout_is_seq_max_deviation": deviation}
        if numbers["n:weight/bounded/std"] == 0.0:
            names |= {"rollout_is_std": NOT_OURS}  # the root of the epsilon in its means
    if params["rollout_is"] == "sequence":
        names |= {
            "rollout_is_max": "all:mismatch/sequence_ratio/max",
            "rollout_is_min": "all:mismatch/sequence_ratio/min",
            "rollout_is_ratio_fraction_high": "all:weight/ratio_trajectory/above",
            # Its ratio of a row without tokens is 1 here and 0 in rollout_is_seq_fraction_low.
            "rollout_is_ratio_fraction_low": NOT_OURS
            if _has_empty_rows(case)
            else "all:weight/ratio_trajectory/below",
        }
    for option in (params["rollout_rs"] or "").split(","):
        names |= _verl_rejection_metrics(option, numbers) if option else {}
    names |= {
        "rollout_rs_masked_fraction": "rejection/rejected_token/mean",
        "rollout_rs_seq_masked_fraction": "all:rejection/rejected_trajectory/mean",
    }
    found.check_metrics(names, "rollout_corr/")


def _verl_rejection_metrics(option: str, numbers: dict[str, float]) -> dict[str, str | float]:
    ours, theirs = f"rejection/{_verl_criterion(option)}", f"rollout_rs_{option}"
    whose = "token" if option.startswith("token") else "trajectory"
    names: dict[str, str | float] = {
        f"{theirs}_mean": f"{ours}/token/mean",
        f"{theirs}_max": f"{ours}/token/max",
        f"{theirs}_min": f"{ours}/token/min",
        f"{theirs}_fraction_high": f"{ours}/{whose}/above",
        f"{theirs}_fraction_low": f"{ours}/{whose}/below",
        f"{theirs}_std": NOT_OURS,  # of the statistic after it was cut to the bounds, which tells little
        f"{theirs}_seq_max_deviation": max(
            abs(numbers[f"{ours}/trajectory/{end}"]) for end in ("max", "min")
        ),
        f"{theirs}_seq_fraction_high": f"{ours}/trajectory/above",
        f"{theirs}_seq_fraction_low": f"{ours}/trajectory/below",
        f"{theirs}_masked_fraction": f"{ours}/rejected_token/mean",
        f"{theirs}_seq_masked_fraction": f"{ours}/rejected_trajectory/mean",
    }
    return names | {
        f"{theirs}_seq_{part}": f"{ours}/trajectory/{part}" for part in ("mean", "std", "max", "min")
    }


def _verl_weight(params: dict[str, Any]) -> dict[str, Any] | None:
    if params["rollout_is"] is None:
        return None
    lower, upper = _low_high(params["rollout_is_threshold"])
    outside = "truncate" if lower is None else "zero"
    bounds = {"outside": outside, "lower": lower, "upper": upper}
    return {"level": params["rollout_is"], "batch_normalize": params["rollout_is_batch_normalize"], **bounds}


def _verl_rejections(params: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    options = (params["rollout_rs"] or "").split(",")
    return tuple(
        _verl_rejection(option, spec)
        for option, spec in zip(options, str(params["rollout_rs_threshold"]).split(","), strict=True)
        if option
    )


def _verl_rejection(option: str, spec: str) -> dict[str, Any]:
    lower, upper = _low_high(spec)
    over, _, statistic = _verl_criterion(option).partition("_")
    if statistic == "k1":
        lower, upper = log(lower or 1 / upper), log(upper)
    return {"statistic": statistic, "over": over, "lower": lower, "upper": upper}


def _verl_criterion(option: str) -> str:
    """seq_mean_k1 -> mean_k1"""
    return option.removeprefix("seq_")


def _low_high(spec: str | float) -> tuple[float | None, float]:
    """ "0.5_2.0" or 2.0"""
    low, _, high = str(spec).rpartition("_")
    return (float(low) if low else None), float(high)


def _verl_mismatch(case: Golden) -> None:
    _correct(case, preset="disabled").check_metrics(VERL_MISMATCH)


# SkyRL: criteria one after the other, each over what the ones before left


def _skyrl(case: Golden) -> None:
    params = case.params
    rejections: list[dict[str, Any]] = []
    if "outlier_token_is_threshold_low" in params:
        rejections.append(
            _ratio("any", params, "outlier_token_is_threshold_low", "outlier_token_is_threshold_high")
        )
    if "token_mask_is_threshold_low" in params:
        rejections.append(
            _ratio("token", params, "token_mask_is_threshold_low", "token_mask_is_threshold_high")
        )
    before_weights = tuple(rejections)
    if params.get("sequence_mask_metric") == "product":
        rejections.append(
            _ratio("sum", {"low": 0.5, "high": 2.0} | params, "product_mask_low", "product_mask_high")
        )
    elif params.get("sequence_mask_metric") == "geometric":
        rejections.append(_ratio("mean", params, "geo_mask_low", "geo_mask_high"))
    weight = None
    if level := params.get("tis_ratio_type"):
        upper = params.get(f"{level}_tis_ratio_clip_high", {"token": 2.0, "sequence": 5.0}[level])
        weight = {"level": level, "upper": upper}
    found = _correct(case, weight=weight, rejections=tuple(rejections), in_order=True)
    found.check_kept()
    weighted = _correct(case, weight=weight, rejections=before_weights, in_order=True)
    if weight:
        weighted.check_weights(weighted.correction.kept)
    full = bool(case.mask.all())
    of = "all:rejection"
    names: dict[str, str | float] = {
        "is_ratio_mean": "mismatch/ratio/mean",
        "is_ratio_std": "mismatch/ratio/std" if full else NOT_OURS,  # it counts padding as ratio 0
        "is_ratio_max": "mismatch/ratio/max",
        "is_ratio_min": "mismatch/ratio/min" if full else NOT_OURS,  # likewise
        "outlier_seq_masked_ratio": f"{of}/any_ratio/rejected_trajectory/mean",
        "outlier_seq_over_high_ratio": f"{of}/any_ratio/trajectory_above/mean",
        "outlier_seq_under_low_ratio": f"{of}/any_ratio/trajectory_below/mean",
        "token_mask_ratio": "rejection/token_ratio/rejected_token/mean",
        "tis_token_clip_high_ratio": weighted.numbers.get("weight/ratio/above", 0.0),
        "tis_seq_clip_high_ratio": weighted.numbers.get("all:weight/ratio_trajectory/above", 0.0),
    }
    for theirs, ours in (("product", "sum"), ("geo", "mean")):
        names |= {
            f"{theirs}_sequence_mask_masked_ratio": f"{of}/{ours}_ratio/rejected_trajectory/mean",
            f"{theirs}_sequence_mask_over_high_ratio": f"{of}/{ours}_ratio/trajectory_above/mean",
            f"{theirs}_sequence_mask_under_low_ratio": f"{of}/{ours}_ratio/trajectory_below/mean",
        }
    found.check_metrics(names)


def _ratio(over: str, params: dict[str, Any], lower: str, upper: str) -> dict[str, Any]:
    bounds = {"lower": params.get(lower, params.get("low")), "upper": params.get(upper, params.get("high"))}
    return {"statistic": "ratio", "over": over, **bounds}


# AReaL: "mask" rejects and leaves the weight as it is; "clamp" truncates it


AREAL_LARGEST_TOKEN = {
    "sequence_clamp_ratio_0.5_2.0_max/outlier_tokens/f64",
    "sequence_clamp_ratio_0.9_1.1_max/moderate_mismatch/f64",
}


def _areal(case: Golden) -> None:
    if case.id.partition("/rollout_correction/")[2] in AREAL_LARGEST_TOKEN:
        raise LeftOut("it bounds the mean ratio from below only where the largest token ratio is too low")
    params = case.params
    lower, upper = params["lower"], params["upper"]
    level = "geometric" if (params["level"], params["metric"]) == ("sequence", "ratio") else "token"
    if params["action"] == "clamp":
        found = _correct(case, weight={"level": level, "lower": lower, "upper": upper}, **UNCUT)
        share = "weight/moved/mean"
    else:
        statistic = params["metric"].removeprefix("kl_")
        if statistic == "k1":  # log ratio, where ours is minus that
            lower, upper = -upper, -lower
        elif statistic == "k3":
            statistic = "reverse_k3"
        over = "token" if params["level"] == "token" else params["agg"]
        criterion = {"statistic": statistic, "over": over, "lower": lower, "upper": upper}
        found = _correct(case, weight={"level": level, "upper": None}, rejections=(criterion,), **UNCUT)
        share = "rejection/rejected_token/mean"
    found.check_kept()
    found.check_weights()
    expected = as_tensor(case.outputs["filtered_fraction"], case.dtype)
    assert_equal(case, "filtered_fraction", torch.tensor(found.numbers[share]), expected)


def _areal_m2po(case: Golden) -> None:
    rejection = {"type": "m2po", "threshold": case.params["m2_threshold"]}
    _correct(case, preset="m2po", rejections=(rejection,)).check_kept()


# NeMo


def _nemo(case: Golden) -> None:
    criterion = {"statistic": "multiplicative_error", "over": "mean"}
    limit = case.params["seq_logprob_error_threshold"]
    # The second one has no bounds: it only reports what the first one kept.
    found = _correct(
        case, weight=None, rejections=(criterion | {"upper": limit}, criterion), in_order=True, **UNCUT
    )
    kept_rows = case.segments.sum(found.correction.kept.to(case.dtype))
    assert_equal(
        case,
        "sample_mask",
        (kept_rows > 0).to(case.dtype)[case.mask.any(1)],
        case.output("sample_mask")[case.mask.any(1)],
    )
    before, after = "rejection/mean_multiplicative_error", "rejection/mean_multiplicative_error_2"
    names: dict[str, str | float] = {
        "num_masked_seqs": float(found.correction.diagnostics.sums[f"{before}/rejected_trajectory/sum"]),
        "masked_correct_pct": NOT_OURS,  # a share of rewards
    }
    for part in ("max", "mean", "min"):
        names[f"{part}_seq_mult_prob_error"] = f"{before}/trajectory/{part}"
        names[f"{part}_seq_mult_prob_error_after_mask"] = f"{after}/trajectory/{part}"
    found.check_metrics(names)


# open-instruct


def _open_instruct(case: Golden) -> None:
    params = case.params
    if not params["use_rho_correction"]:
        _correct(case, preset="disabled").check_weights()
        return
    level = "geometric" if params["rho_mask_sequence_level"] else "token"
    lower, upper = params["rho_mask_lower_bound"] or None, params["rho_mask_upper_bound"] or None
    if params["rho_mask_tv_divergence"]:
        criterion = {"statistic": "ratio_deviation", "over": "mean", "only": "diverging"}
    else:
        criterion = {"statistic": "ratio", "over": "mean" if level == "geometric" else "token"}
    options: dict[str, Any] = {
        "max_log_ratio": 10.0,
        "weight": {
            "level": level,
            "lower": params["rho_clamp_lower_bound"] or None,
            "upper": params["rho_clamp_upper_bound"] or None,
        },
        "advantages": True,
    }
    both, low, high = (
        _correct(case, rejections=(criterion | bounds,), **options)
        for bounds in ({"lower": lower, "upper": upper}, {"lower": lower}, {"upper": upper})
    )
    both.check_weights()
    dropped = "rejection/rejected_token/mean"
    both.check_metrics(
        {
            "val/rho_drop_frac": dropped,
            "val/rho_drop_low_frac": low.numbers[dropped],
            "val/rho_drop_high_frac": high.numbers[dropped],
            "val/rho_weight": "weight/applied/mean",
            "val/rho_clipfrac": "weight/moved/mean",
        }
    )


def _open_instruct_debug(case: Golden) -> None:
    names: dict[str, str | float] = {
        "diff_mean": "mismatch/logprob_difference/mean",
        "diff_max": "mismatch/logprob_difference/max",
        "diff_std": "mismatch/logprob_difference/std",
        # It weights samples of the rollout by the rollout's probability once more: an estimate of nothing.
        "debug/vllm_local_reverse_kl": NOT_OURS,
    }
    _correct(case, preset="disabled").check_metrics(names, "debug/vllm_vs_local_logprob_")


# ROLL: "geometric" is the mean over a row, "sequence" the sum


def _roll(case: Golden) -> None:
    params = case.params
    over = {"token": "token", "geometric": "mean", "sequence": "sum"}
    weight = None
    if params["is_weight"]["enabled"]:
        weight = {"level": params["is_weight"]["weight_type"], "upper": params["is_weight"]["upper_bound"]}
    rejections: list[dict[str, Any]] = []
    for criterion in params["filters"]:
        for kind, statistic in (("ratio", "ratio"), ("diff", "probability_difference")):
            if criterion[f"{kind}_enabled"]:
                bounds = {"lower": criterion[f"{kind}_low"], "upper": criterion[f"{kind}_high"]}
                rejections.append({"statistic": statistic, "over": over[criterion["agg_type"]], **bounds})
    found = _correct(case, weight=weight, rejections=tuple(rejections), **UNCUT)
    found.check_kept("filter_mask")
    _correct(case, weight=weight, **UNCUT).check_weights()
    reported = tuple({"statistic": "probability_difference", "over": o} for o in over.values())
    numbers = _correct(case, weight=weight, rejections=reported, **UNCUT).numbers
    full = bool(case.mask.all())
    names: dict[str, str | float] = {
        "ratio_token_mean@sum": "mismatch/trajectory_ratio/mean",
        "ratio_geometric_mean@sum": "mismatch/geometric_ratio/mean",
        "ratio_sequence_mean@sum": "mismatch/sequence_ratio/mean",
        "ratio_segment_mean@sum": NOT_OURS,  # a segment is a turn, which Segments do not tell apart
        "diff_segment_mean@sum": NOT_OURS,
        "actor/is_weight_clipfrac@sum": "weight/ratio/above"
        if full
        else NOT_OURS,  # its numerator counts padding
        "final_mask_mean": 1 - found.numbers["rejection/rejected_token/mean"],
    }
    for theirs, ours in over.items():
        name = f"rejection/{ours}_probability_difference/trajectory/mean"
        names[f"diff_{theirs}_mean@sum"] = numbers[name]
        for kind, statistic in (("ratio", "ratio"), ("diff", "probability_difference")):
            kept = 1 - found.numbers.get(f"rejection/{ours}_{statistic}/rejected_token/mean", 0.0)
            names[f"{theirs}_{kind}_mask_mean@sum"] = kept if full else NOT_OURS  # likewise
    found.check_metrics(names, "actor/train_infer_")


# slime


def _slime(case: Golden) -> None:
    outside = "zero" if case.function.endswith("icepop_function") else "truncate"
    bounds = {"lower": case.params["tis_clip_low"], "upper": case.params["tis_clip"]}
    found = _correct(case, weight={"outside": outside, **bounds}, **UNCUT)
    found.check_weights()
    clipped = case.output("clipped")[case.mask].mean()
    assert_equal(case, "clipped", torch.tensor(found.numbers["weight/moved/mean"]), clipped)


def _slime_opsm(case: Golden) -> None:
    config = _off_policy_mask(case.params["opsm_delta"], between="learner_proximal")
    old = case.flat("old_log_probs")
    policies = Policies(learner=case.flat("log_probs"), proximal=old, rollout=old)
    found = _found(case, policies, config, case.flat("advantages"))
    found.check_kept()
    if case.mask.all():  # else its numerator counts padding
        number = found.correction.diagnostics.sums["rejection/rejected_trajectory/sum"]
        assert_equal(case, "clipfrac", number, as_tensor(case.outputs["clipfrac"], case.dtype))


# TRL


def _trl_off_policy_mask(case: Golden) -> None:
    config = _off_policy_mask(case.params["off_policy_threshold"], between="learner_rollout")
    learner = case.flat("log_probs")
    policies = Policies(learner=learner, proximal=learner, rollout=case.flat("rollout_log_probs"))
    _found(case, policies, config, case.flat("advantages")).check_kept("row_mask")


def _off_policy_mask(threshold: float, *, between: str) -> OffPolicyCorrection:
    preset = OffPolicyCorrection(preset="deepseek_v3_2")
    (criterion,) = preset.rejections
    changed = criterion.model_copy(update={"upper": threshold, "between": between})
    return preset.model_copy(update={"rejections": (changed,), **UNCUT})


def _trl(case: Golden) -> None:
    level, _, action = case.params["mode"].partition("_")
    weight = {
        "level": level,
        "outside": "zero" if action == "mask" else "truncate",
        "lower": case.params["clip_min"],
        "upper": case.params["clip_max"],
    }
    _correct(case, weight=weight, **UNCUT).check_weights()
