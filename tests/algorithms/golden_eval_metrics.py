"""The numbers of an evaluation; tests/envs/test_eval_metrics.py holds them bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from asyncrl.envs.eval_metrics import majority_samples, pass_at_k, source_metrics
from tests.algorithms.goldens import Golden, as_tensor, assert_equal


def replay(case: Golden) -> None:
    {
        "process_validation_metrics": _verl,
        "calc_maj_val": _verl_majority,
        "compute_pass_at_k_metrics": _open_instruct,
    }[case.function.rpartition("::")[2]](case)


def _verl(case: Golden) -> None:
    infos = case.inputs["infos"]
    for source, metrics in case.outputs["metrics"].items():
        columns = {name: list(_by_prompt(case, source, values)) for name, values in infos.items()}
        found = source_metrics({"score": columns["score"]}, columns.get("pred"))["score"]
        _compare(case, found, metrics["score"])


def _by_prompt(case: Golden, source: str, values: list[Any]) -> Any:
    prompts: dict[str, list[Any]] = {}
    rows = zip(case.inputs["data_sources"], case.inputs["sample_uids"], values, strict=True)
    for of_source, prompt, value in rows:
        if of_source == source:
            prompts.setdefault(prompt, []).append(value)
    return prompts.values()


def _verl_majority(case: Golden) -> None:
    data = case.inputs["data"]
    votes = [sample[case.params["vote_key"]] for sample in data]
    (chosen,) = majority_samples(votes, np.arange(len(data))[None])
    assert data[chosen][case.params["val_key"]] == case.outputs["maj"]


def _open_instruct(case: Golden) -> None:
    rows = case.inputs["correct_per_prompt"]
    found = pass_at_k([sum(row) for row in rows], len(rows[0]))
    # Its other estimate is recorded for one sample and for all of them, where it is the unbiased one.
    numbers = {f"eval/pass_at_{k}": found[k] for k in (1, len(rows[0]))}
    numbers |= {f"eval/pass_at_{k}_unbiased": value for k, value in found.items()}
    _compare(case, numbers, case.outputs["metrics"])


def _compare(case: Golden, found: dict[str, float], expected: dict[str, float]) -> None:
    for name, value in expected.items():
        number = torch.tensor(found[name], dtype=torch.float64)
        assert_equal(case, name, number, as_tensor(value, torch.float64))
