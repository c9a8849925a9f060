"""KL estimators of peers, value and gradient."""

from __future__ import annotations

import torch

from asyncrl.algorithms.losses.kl import kl_estimate
from tests.algorithms.goldens import Golden, assert_equal

ESTIMATORS = {"kl": "k1", "low_var_kl": "k3", 0: "k1", 1: "k2", 2: "k3"}


def replay(case: Golden) -> None:
    mask = case.mask if "mask" in case.inputs else torch.ones_like(case.tensor("log_probs"), dtype=torch.bool)
    learner = case.tensor("log_probs")[mask].requires_grad_()
    kl = kl_estimate(learner, case.tensor("ref_log_probs")[mask], **options(case, learner, mask))
    kl.sum().backward()
    assert learner.grad is not None
    for name, found in {"kl": kl.detach(), "grad_log_probs": learner.grad}.items():
        if name in case.outputs:
            whole = torch.zeros(mask.shape, dtype=case.dtype).masked_scatter(mask, found)
            assert_equal(case, name, whole, case.output(name))


def options(case: Golden, learner: torch.Tensor, mask: torch.Tensor) -> dict:
    params = case.params
    name = params["estimator"]
    plain = str(name).removesuffix("+")
    estimator = ESTIMATORS.get(name, ESTIMATORS.get(plain, plain))
    options: dict = {"estimator": estimator, "gradient_of_k2": str(name).endswith("+")}
    if case.peer in ("verl", "skyrl") and estimator == "k3":
        options |= {"clamp_log_ratio": 20.0, "clamp_estimate": 10.0}
    elif (
        (case.peer == "roll" and estimator == "k3")
        or (case.peer == "slime" and name == "low_var_kl")
        or case.peer == "openrlhf"
    ):
        options |= {"clamp_estimate": 10.0}
    elif case.peer == "nemo":
        options |= {"clamp_log_ratio": params["input_clamp"], "clamp_estimate": params["output_clamp"]}
    elif case.peer == "areal":
        options |= {"clamp_estimate": params["output_clamp"]}
    elif case.peer == "open_instruct":
        options |= {"clamp_log_ratio": params["difference_clamp"]}
    if "importance_ratio" in params:
        options["weight"] = (learner - case.tensor("old_log_probs")[mask]).exp()
    if "importance_sampling_weights" in params:
        options["weight"] = (learner - learner.detach()).exp()
    return options
