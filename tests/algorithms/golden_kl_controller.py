"""The adaptive KL coefficient of peers."""

from __future__ import annotations

import torch

from asyncrl.algorithms.losses.kl_controller import AdaptiveKlController
from tests.algorithms.goldens import Golden, assert_equal


def replay(case: Golden) -> None:
    params = case.params
    controller = AdaptiveKlController(
        params["init_kl_coef"], target=params["target_kl"], horizon=params["horizon"]
    )
    found = []
    for kl in case.inputs["current_kl"]:
        controller.update(kl, params["n_steps"])
        found.append(controller.coefficient)
    name = "coef_after_each_update"
    assert_equal(case, name, torch.tensor(found, dtype=torch.float64), case.output(name))
