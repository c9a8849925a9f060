"""Policy losses of peers: preset, explicit options, and what a peer's global counts say.

Compared: the loss, its gradient with respect to the log-probs (0 outside the mask), and the metrics that are ours too
(clip fractions, KLs, per-token losses). Other metrics of the peers belong to the diagnostics of off-policy correction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms.correction import Policies, correct
from asyncrl.algorithms.losses import Counts, bounded_exp
from asyncrl.algorithms.losses.entropy import top_entropy_tokens
from asyncrl.algorithms.losses.kl import kl_estimate
from asyncrl.algorithms.losses.objective import LossCounts, objective
from asyncrl.algorithms.losses.policy import LossTokens, select_tokens
from asyncrl.algorithms.losses.sequence import gamma_weights
from asyncrl.algorithms.segments import Segments
from asyncrl.config.corrections import OffPolicyCorrection
from asyncrl.config.losses import LossConfig
from tests.algorithms.goldens import Golden, LeftOut, as_tensor, assert_equal
from tests.algorithms.loss_cases import compare_gradients, flat_leaf
from tests.algorithms.peer_corrections import correction_options

SUM = {"mode": "token-sum"}


def replay(case: Golden) -> None:
    name = case.function.rpartition("::")[2]
    if name in FUNCTIONS:
        FUNCTIONS[name](case)
        return
    if "sample_mask" in case.inputs:
        case = without_rows(case)
    options, batch = PEERS[case.peer](case)
    preset = options.pop("preset", case.preset)
    config = LossConfig.model_validate({"preset": preset, **options})
    learner = flat_leaf(case, "log_probs")
    tokens = LossTokens(
        learner_logprobs=learner,
        proximal_logprobs=proximal(case),
        advantages=spread(case, "advantages"),
        segments=case.segments,
        rollout_logprobs=optional(case, "rollout_log_probs"),
        ref_logprobs=optional(case, "ref_log_probs"),
        entropy=optional(case, "entropies"),
        group_index=batch.pop("group_index", None),
        token_weights=batch.pop("token_weights", None),
        positive=batch.pop("positive", None),
    )
    tokens = replace(tokens, selected=select_tokens(config, tokens))
    counted = torch.ones_like(learner, dtype=torch.bool)
    if (correction_of := correction_options(case)) is not None:
        tokens, counted = corrected(tokens, OffPolicyCorrection.model_validate(correction_of))
    trained = batch.pop("counts", None) or Counts.of(
        Segments(tokens.segments.index[counted], tokens.segments.num_trajectories), tokens.group_index
    )
    found = objective(config, tokens, LossCounts(trained, **batch))
    if not counted.any():
        raise LeftOut("everything rejected: a NaN loss with a gradient of 0")
    found.loss.backward()
    compare_gradients(case, {"log_probs": learner})
    if (
        case.peer == "trl"
        and ("GMPO" in case.function or "RLOO" in case.function)
        and not case.mask.any(1).all()
    ):
        raise LeftOut("gradient equal; the loss has a constant for a row without tokens")
    assert_equal(case, "loss", found.loss, case.output("loss"))
    compare_metrics(case, found.diagnostics, counted)


METRICS = {
    "verl": {
        "actor/pg_clipfrac": "pg_clipfrac",
        "actor/pg_clipfrac_lower": "pg_clipfrac_lower",
        "actor/ppo_kl": "ppo_kl",
    },
    "openrlhf": {"clip_ratio": "pg_clipfrac", "ppo_kl": "ppo_kl"},
    "skyrl": {"clip_ratio": "pg_clipfrac", "importance_ratio": "ratio"},
    "open_instruct": {"clipfrac": "pg_clipfrac", "kl": "kl"},
    "slime": {"clipfrac": "pg_clipfrac"},
    "areal": {"clip_mask": "pg_clipfrac", "dual_clip_mask": "pg_clipfrac_lower"},
    "megatron_rl": {"kl_term": "kl"},
    "trl": {"kl": "kl"},
    "prime_rl": {"is_masked": "pg_clipfrac"},
}
"""A peer's metric -> our diagnostic; a number is a mean over trained tokens."""


def compare_metrics(case: Golden, diagnostics: dict[str, Tensor], counted: Tensor) -> None:
    for name, ours in METRICS.get(case.peer, {}).items():
        expected = case.outputs.get("metrics", {}).get(name)
        if expected is None or ours not in diagnostics:
            continue
        if name == "actor/ppo_kl" and ("kl_cov" in case.id or "extreme" in case.id):
            continue  # verl's is of |log ratio| in the one, of log ratios cut at 20 in the other
        found = diagnostics[ours].to(case.dtype)
        if case.peer == "prime_rl":
            found, expected = case.segments.mean(found), as_tensor(expected, case.dtype)
        elif isinstance(expected, list):
            expected = as_tensor(expected, case.dtype)[case.mask]
        else:
            expected = as_tensor(expected, case.dtype)
            found = found[counted].mean()
        assert_equal(case, name, found, expected)


def without_rows(case: Golden) -> Golden:
    """Rows with sample_mask 0 do not train."""
    rows = case.tensor("sample_mask")
    mask = (case.mask * rows[:, None]).tolist()
    return replace(case, inputs={**case.inputs, "mask": mask})


def proximal(case: Golden) -> Tensor:
    """The sampler's in a loss that knows no other: verl's bypass mode, prime-rl."""
    return case.flat("old_log_probs" if "old_log_probs" in case.inputs else "rollout_log_probs")


def optional(case: Golden, name: str) -> Tensor | None:
    return spread(case, name) if name in case.inputs else None


def corrected(tokens: LossTokens, config: OffPolicyCorrection) -> tuple[LossTokens, Tensor]:
    """With the correction's weights, and which tokens still count in the denominator."""
    rollout = tokens.proximal_logprobs if tokens.rollout_logprobs is None else tokens.rollout_logprobs
    policies = Policies(tokens.learner_logprobs, tokens.proximal_logprobs, rollout)
    correction = correct(policies, tokens.segments, config, advantages=tokens.advantages)
    return replace(tokens, token_weights=correction.weights), correction.counted


def spread(case: Golden, name: str) -> Tensor:
    """[B], [B, 1] or [B, T] -> [N]."""
    values = case.tensor(name)
    return values.reshape(len(values), -1).expand(case.mask.shape)[case.mask]


def shared_counts(tokens: float, trajectories: float = 0.0) -> Counts:
    return Counts(tokens, trajectories, trajectories, trajectories)


def areal(case: Golden) -> tuple[dict, dict]:
    params = case.params
    level = params.get("importance_sampling_level", "token")
    if "tau_pos" in params:
        policy = {
            "type": "sapo",
            "ratio": level,
            "mean_advantages": level == "sequence",
            "tau_positive": params["tau_pos"],
            "tau_negative": params["tau_neg"],
        }
        return {"policy": policy}, {}
    policy = {
        "type": "gspo" if level == "sequence" else "ppo",
        "clip_low": params["eps_clip"],
        "clip_high": params.get("eps_clip_higher") or params["eps_clip"],
        "dual_clip": params.get("c_clip"),
    }
    return {"policy": policy}, {}


def deepspeed_chat(case: Golden) -> tuple[dict, dict]:
    clip = case.params["cliprange"]
    return {"policy": {"type": "ppo", "clip_low": clip, "clip_high": clip}}, {}


def megatron_rl(case: Golden) -> tuple[dict, dict]:
    params = case.params
    options: dict[str, Any] = {
        "policy": {
            "type": "ppo",
            "clip_low": params["clamp_eps_lower"],
            "clip_high": params["clamp_eps_upper"],
        },
        "aggregation": SUM,
        "kl": {"coef": params["kl_beta"]},
        "entropy": {"coef": params["entropy_weight"]},
    }
    return options, {}


def nemo(case: Golden) -> tuple[dict, dict]:
    params = case.params
    batch: dict[str, Any] = {
        "counts": shared_counts(params["global_valid_toks"], params["global_valid_seqs"])
    }
    options: dict[str, Any] = {}
    clip_low, clip_high = params.get("ratio_clip_min", 0.2), params.get("ratio_clip_max", 0.2)
    if params.get("disable_ppo_ratio"):
        options["policy"] = {"type": "reinforce"}
    elif params.get("use_cispo"):
        options["policy"] = {"type": "cispo", "ratio_min": 1 - clip_low, "ratio_max": 1 + clip_high}
    else:
        kind = "gspo" if params.get("sequence_level_importance_ratios") else "ppo"
        options["policy"] = {
            "type": kind,
            "clip_low": clip_low,
            "clip_high": clip_high,
            "dual_clip": params.get("ratio_clip_c"),
            "anchor": "learner" if params.get("force_on_policy_ratio") else "proximal",
        }
    if not params.get("token_level_loss", True):
        options["aggregation"] = {"mode": "seq-mean-token-mean"}
    if params["reference_policy_kl_penalty"]:
        options["kl"] = {
            "coef": params["reference_policy_kl_penalty"],
            "estimator": params["reference_policy_kl_type"],
        }
        if params.get("use_on_policy_kl_approximation"):
            options["kl"]["weight"] = "rollout_ratio"
    if "positive_example_nll_weight" in params:
        options["ptx"] = {"positive_coef": params["positive_example_nll_weight"]}
        batch["positive"] = case.segments.spread(case.tensor("rewards") > 0)
        batch["positive_tokens"] = float(batch["positive"].sum())
    return options, batch


def open_instruct(case: Golden) -> tuple[dict, dict]:
    params = case.params
    if params["loss_fn"] == "cispo":
        policy = {"type": "cispo", "ratio_max": 1 + params["clip_higher"]}
    else:
        policy = {"type": "ppo", "clip_low": params["clip_lower"], "clip_high": params["clip_higher"]}
    options: dict[str, Any] = {"policy": policy}
    if params["loss_denominator"] != "token":
        options["aggregation"] = {"mode": "token-sum", "divide_by": float(params["loss_denominator"])}
    if params["kl_estimator"] is not None:
        estimator = ("k1", "k2", "k3", "k1")[params["kl_estimator"]]
        weight = "ratio" if params["kl_estimator"] == 3 else "none"
        options["kl"] = {"coef": params["beta"], "estimator": estimator, "weight": weight}
    return options, {"token_weights": optional(case, "rho_weights")} if case.inputs["rho_weights"] else {}


def openrlhf(case: Golden) -> tuple[dict, dict]:
    params = case.params
    kind = params.get("policy_loss_type", "ppo")
    policy = {
        "type": kind,
        "clip_low": params["clip_eps_low"],
        "clip_high": params["clip_eps_high"],
        "dual_clip": params.get("dual_clip"),
    }
    if kind == "gspo" and params.get("enable_vllm_is_correction"):
        policy["anchor"] = "rollout"  # the correction is in the ratio
    options: dict[str, Any] = {"policy": policy}
    if not params.get("token_level_loss", True):
        options["aggregation"] = {"mode": "seq-mean-token-mean", "divide_by": "trained_trajectories"}
    return options, global_counts(params)


def global_counts(params: dict) -> dict:
    """A rank's share: the peers' gradients are averaged over ranks, ours are summed."""
    if params.get("batch_num_tokens") is None and params.get("global_batch_size") is None:
        return {}
    ranks = params.get("dp_size", 1)
    return {"counts": shared_counts(params["batch_num_tokens"] / ranks, params["global_batch_size"] / ranks)}


def prime_rl(case: Golden) -> tuple[dict, dict]:
    params = case.params
    batch = {"counts": shared_counts(params["rl_scale"])}
    kind = params["loss"].removesuffix("_tight")
    if kind == "ce":
        return {"policy": {"type": "cross_entropy"}}, batch
    if kind == "ref_kl":
        raise LeftOut("on-policy distillation")
    options: dict[str, Any] = {"kl": {"coef": 2 * params["kl_tau"]}}
    if kind == "ipo":
        options["policy"] = {"type": "ipo", "threshold": params["ipo_threshold"]}
    else:
        options["policy"] = {
            "type": "dppo",
            "delta_low": params["dppo_mask_low"],
            "delta_high": params["dppo_mask_high"],
        }
    return options, batch


SKYRL_REDUCTIONS = {
    "token_mean": "token-mean",
    "token_mean_legacy": "prompt-mean",
    "sequence_mean": "seq-mean-token-mean",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
    "prompt_mean": "prompt-mean",
}


def skyrl(case: Golden) -> tuple[dict, dict]:
    params = case.params
    kind = params["policy_loss_type"]
    clips = {"clip_low": params.get("eps_clip_low", 0.2), "clip_high": params.get("eps_clip_high", 0.2)}
    policies: dict[str, Callable[[], dict]] = {
        "regular": lambda: {"type": "ppo", **clips},
        "dual_clip": lambda: {"type": "ppo", **clips, "dual_clip": params["clip_ratio_c"]},
        "gspo": lambda: {"type": "gspo", **clips},
        "cispo": lambda: {
            "type": "cispo",
            "anchor": "rollout" if params["cispo"]["cispo_anchor"] == "rollout" else "proximal",
            "ratio_min": 1 - params["cispo"]["cispo_eps_clip_low"],
            "ratio_max": 1 + params["cispo"]["cispo_eps_clip_high"],
        },
        "rollout_is": lambda: {
            "type": "cispo",
            "anchor": "rollout",
            "outside": "zero",
            "ratio_min": 1 - clips["clip_low"],
            "ratio_max": 1 + clips["clip_high"],
        },
        "sapo": lambda: {
            "type": "sapo",
            "tau_positive": params["sapo"]["tau_pos"],
            "tau_negative": params["sapo"]["tau_neg"],
        },
        "dppo": lambda: {
            "type": "dppo",
            "divergence": params["dppo"]["dppo_type"].removeprefix("binary_"),
            "delta_low": params["dppo"]["delta_low"],
            "delta_high": params["dppo"]["delta_high"],
        },
        "clip_cov": lambda: {
            "type": "clip_cov",
            **clips,
            "share": params["clip_cov"]["clip_ratio"],
            "lowest": params["clip_cov"]["clip_cov_lb"],
            "highest": params["clip_cov"]["clip_cov_ub"],
        },
        "kl_cov": lambda: {
            "type": "kl_cov",
            "share": params["kl_cov"]["kl_cov_frac"],
            "coef": params["kl_cov"]["ppo_kl_coef"],
        },
        "importance_sampling": lambda: {"type": "importance_weighted"},
        "cross_entropy": lambda: {"type": "cross_entropy"},
    }
    options: dict[str, Any] = {"policy": policies[kind](), "aggregation": SUM}
    reduction = params.get("loss_reduction_applied")
    batch: dict[str, Any] = {}
    if reduction in SKYRL_REDUCTIONS:
        options["aggregation"] = {"mode": SKYRL_REDUCTIONS[reduction], "length": float(params["max_seq_len"])}
        rows = torch.zeros(len(case.inputs["mask"]), dtype=torch.int64)
        size = params["micro_batch_size"]
        ranges = params["prompt_boundaries"]
        if reduction == "token_mean_legacy":
            ranges = [(start, start + size) for start in range(0, len(rows), size)]
        for number, (start, end) in enumerate(ranges):
            rows[start:end] = number
        batch["group_index"] = rows
        batch["counts"] = Counts.of(case.segments)
        batch["counts"] = Counts(
            batch["counts"].tokens,
            batch["counts"].trajectories,
            batch["counts"].trained_trajectories,
            len(ranges),
        )
    return options, batch


def slime(case: Golden) -> tuple[dict, dict]:
    params = case.params
    low, high = params["eps_clip"], params["eps_clip_high"]
    if "cispo" in case.function:
        return {
            "policy": {"type": "cispo", "ratio_min": 1 - low, "ratio_max": 1 + high},
            "aggregation": SUM,
        }, {}
    kind = "gspo" if "gspo" in case.function else "ppo"
    policy = {"type": kind, "clip_low": low, "clip_high": high, "dual_clip": params.get("eps_clip_c")}
    return {"policy": policy, "aggregation": SUM}, {}


def torchrl(case: Golden) -> tuple[dict, dict]:
    params = case.params
    if params["class"] == "CISPOLoss":
        raise LeftOut("CISPO without a stop-gradient and a log-prob")
    clip = params["clip_epsilon"]
    low, high = clip if isinstance(clip, list) else (clip, clip)
    options: dict[str, Any] = {"policy": {"type": "ppo", "clip_low": low, "clip_high": high}}
    if params.get("aggregation") == "prompt_mean":
        options["aggregation"] = {"mode": "seq-mean-token-mean"}
    positions = float(case.mask.numel())  # the KL is a mean over all of them, masked ones as 0
    batch: dict[str, Any] = {"kl": shared_counts(positions)}
    if "kl_to_ref_coeff" in params:
        options["kl"] = {"coef": params["kl_to_ref_coeff"]}
    if "kl_to_inference_coeff" in params:
        options["kl"] = {"coef": params["kl_to_inference_coeff"], "reference": "proximal"}
    if "entropy_coeff" in params:
        options["entropy"] = {"coef": params["entropy_coeff"]}
    if "kl_mask_threshold" in params:
        k2 = kl_estimate(case.flat("log_probs"), case.flat("old_log_probs"), estimator="k2")
        keep = k2 <= params["kl_mask_threshold"]
        batch |= {"token_weights": keep, "counts": shared_counts(float(keep.sum()))}
    return options, batch


TRL_MODES = {
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
    "dr_grpo": "seq-mean-token-sum-norm",
}


def trl(case: Golden) -> tuple[dict, dict]:
    params = case.params
    if "AsyncGRPO" in case.function:
        return trl_async(case)
    clips = {"clip_low": params["epsilon_low"], "clip_high": params["epsilon_high"]}
    rows = float(len(case.inputs["mask"])) * params.get("current_gradient_accumulation_steps", 1)
    if "RLOO" in case.function:
        options = {"policy": {"type": "ppo", **clips, "ratio": "sequence_sum"}}
        return options | {"aggregation": {"mode": "seq-mean-token-mean"}}, {}
    kind, level = params["loss_type"], params["importance_sampling_level"]
    if "GMPO" in case.function:
        kind, policy = "grpo", {"type": "gmpo", **clips}
    elif kind == "cispo":
        policy = {"type": "cispo", "ratio_max": params["epsilon_high"]}
    elif kind == "sapo":
        taus = (params["sapo_temperature_pos"], params["sapo_temperature_neg"])
        policy = {"type": "sapo", "tau_positive": taus[0], "tau_negative": taus[1]}
    elif kind == "vespo":
        policy = {"type": "vespo"}
        for name in ("k", "lambda"):
            policy |= {f"{name}_positive": params[f"vespo_{name}_pos"]}
            policy |= {f"{name}_negative": params[f"vespo_{name}_neg"]}
    elif level != "token":
        policy = {"type": "gspo", **clips, "ratio": level}
    else:
        policy = {"type": "ppo", **clips, "max_ratio": params["delta"]}
    options: dict[str, Any] = {"policy": policy}
    options["top_entropy_share"] = params.get("top_entropy_quantile")
    if params["beta"]:
        weight = "ratio" if params.get("use_bias_correction_kl") else "none"
        options["kl"] = {"coef": params["beta"], "weight": weight}
    options["aggregation"] = {
        "mode": TRL_MODES.get(kind, "token-mean"),
        "length": float(params["max_completion_length"]),
    }
    tokens = float(case.mask.sum())
    if kind in ("dapo", "cispo", "vespo"):
        tokens = params["num_items_in_batch"] / params["num_processes"]
    batch = {
        "counts": shared_counts(tokens, rows),
        "token_weights": optional(case, "importance_sampling_ratio"),
    }
    return options, batch


def trl_async(case: Golden) -> tuple[dict, dict]:
    params = case.params
    policy = {
        "type": "ppo",
        "clip_low": params["epsilon_low"],
        "clip_high": params["epsilon_high"],
        "anchor": "proximal",  # recorded under that name; the trainer gives it the sampler's
    }
    share = params["global_n_tokens"] * params["gradient_accumulation_steps"] / params["num_processes"]
    return {"preset": "trl_async", "policy": policy}, {"counts": shared_counts(share)}


def verl(case: Golden) -> tuple[dict, dict]:
    params = case.params
    mode = params["loss_mode"]
    if mode == "geo_mean" and "rollout_is_weights" in case.inputs:
        raise LeftOut("the geometric mean of a trajectory's correction weights")
    low, high = params["clip_ratio_low"], params["clip_ratio_high"]
    if mode == "bypass_mode":
        mode = {"ppo_clip": "vanilla", "reinforce": "gpg"}[params["loss_type"]]
    policies: dict[str, Callable[[], dict]] = {
        "vanilla": lambda: {
            "type": "ppo",
            "clip_low": low,
            "clip_high": high,
            "dual_clip": params["clip_ratio_c"],
        },
        "gspo": lambda: {"type": "gspo", "clip_low": low, "clip_high": high},
        "geo_mean": lambda: {"type": "gmpo", "clip_low": low, "clip_high": high},
        "cispo": lambda: {"type": "cispo", "ratio_min": 1 - low, "ratio_max": 1 + high},
        "sapo": lambda: {
            "type": "sapo",
            "tau_positive": params["tau_pos"],
            "tau_negative": params["tau_neg"],
        },
        "dppo_tv": lambda: dppo("tv"),
        "dppo_kl": lambda: dppo("kl"),
        "gpg": lambda: {"type": "reinforce"},
        "dro": lambda: {"type": "dro", "beta": params["dro_beta"]},
        "clip_cov": lambda: {
            "type": "clip_cov",
            "clip_low": low,
            "clip_high": high,
            "share": params["clip_cov_ratio"],
            "lowest": params["clip_cov_lb"],
            "highest": params["clip_cov_ub"],
        },
        "kl_cov": lambda: {
            "type": "kl_cov",
            "share": params["kl_cov_ratio"],
            "coef": params["ppo_kl_coef"],
        },
    }

    def dppo(divergence: str) -> dict:
        return {
            "type": "dppo",
            "divergence": divergence,
            "delta_low": low,
            "delta_high": high,
            "max_ratio": params["clip_ratio_c"],
        }

    options: dict[str, Any] = {"policy": policies[mode]()}
    if mode not in ("gspo", "geo_mean", "sapo"):  # those ignore the mode that is asked for
        aggregation = params["loss_agg_mode"]
        options["aggregation"] = {
            "mode": aggregation,
            "divide_by": "trained_trajectories" if aggregation.startswith("seq") else None,
            "length": float(params.get("loss_scale_factor") or len(case.inputs["mask"][0])),
        }
    return options, {"token_weights": optional(case, "rollout_is_weights"), **global_counts(params)}


def high_entropy_mask(case: Golden) -> None:
    found = torch.zeros(case.mask.shape, dtype=case.dtype)
    found[case.mask] = top_entropy_tokens(case.flat("entropies"), share=1 - case.params["threshold"]).to(
        case.dtype
    )
    assert_equal(case, "mask", found, case.output("mask"))


def phi(case: Golden) -> None:
    params = case.params
    weights = gamma_weights(
        case.flat("log_ratio"),
        spread(case, "advantages"),
        case.segments,
        k_positive=params["k_pos"],
        lambda_positive=params["lambda_pos"],
        k_negative=params["k_neg"],
        lambda_negative=params["lambda_neg"],
    )
    expected = case.output("phi").expand(case.mask.shape)[case.mask]
    assert_equal(case, "phi", weights, expected)


def safe_exp(case: Golden) -> None:
    found = bounded_exp(case.tensor("delta"), case.params["clip"])
    assert_equal(case, "ratio", found, case.output("ratio"))


FUNCTIONS: dict[str, Callable[[Golden], None]] = {
    "GRPOTrainer.get_high_entropy_mask": high_entropy_mask,
    "GRPOTrainer.get_gamma_weights": phi,
    "safe_exp_delta": safe_exp,
}
PEERS = {
    "areal": areal,
    "deepspeed_chat": deepspeed_chat,
    "megatron_rl": megatron_rl,
    "nemo": nemo,
    "open_instruct": open_instruct,
    "openrlhf": openrlhf,
    "prime_rl": prime_rl,
    "skyrl": skyrl,
    "slime": slime,
    "torchrl": torchrl,
    "trl": trl,
    "verl": verl,
}
