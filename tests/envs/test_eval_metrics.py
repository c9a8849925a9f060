"""The numbers of evaluations, against recorded values of verl and open-instruct and against brute force."""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.envs.eval_metrics import (
    flat_metrics,
    majority_samples,
    pass_at_k,
    prompt_metrics,
    source_metrics,
    subset_sizes,
)

GOLDENS = Path(os.environ.get("ASYNCRL_GOLDENS", Path(__file__).parents[1] / "data"))
CASES = {case["id"]: case for case in json.loads((GOLDENS / "golden_eval_metrics.json").read_text())}


def cases(function: str) -> list[Any]:
    return [
        pytest.param(case, id=name)
        for name, case in CASES.items()
        if case["function"].endswith("::" + function)
    ]


@pytest.mark.parametrize("case", cases("process_validation_metrics"))
def test_verls_numbers_come_out_to_the_last_bit(case: dict[str, Any]):
    # Mutations: a new seed for maj's draws; std with n - 1; ties of maj to the last answer seen; 999 draws.
    expected = case["outputs"]["metrics"]
    sources, uids, infos = (case["inputs"][name] for name in ("data_sources", "sample_uids", "infos"))
    assert set(infos) <= {"score", "pred"}
    for source, of_source in expected.items():
        scores: dict[str, list[float]] = {}
        preds: dict[str, list[str]] = {}
        for index, (of, uid) in enumerate(zip(sources, uids, strict=True)):
            if of == source:
                scores.setdefault(uid, []).append(infos["score"][index])
                preds.setdefault(uid, []).append(infos.get("pred", [""] * len(uids))[index])
        votes = list(preds.values()) if "pred" in infos else None
        found = source_metrics({"score": list(scores.values())}, votes)["score"]
        assert {name: found[name] for name in of_source["score"]} == of_source["score"]
        assert {name for name in found if not name.startswith("pass@")} == set(of_source["score"])


@pytest.mark.parametrize("case", cases("calc_maj_val"))
def test_the_majority_is_verls(case: dict[str, Any]):
    data = case["inputs"]["data"]
    draw = np.arange(len(data))[None]
    chosen = majority_samples([sample["pred"] for sample in data], draw)
    assert data[chosen[0]]["val"] == case["outputs"]["maj"]


@pytest.mark.parametrize("case", cases("compute_pass_at_k_metrics"))
def test_pass_at_k_is_open_instructs_unbiased_one(case: dict[str, Any]):
    # Mutation: 1 - (1 - c/N)^k, which is biased.
    rows = case["inputs"]["correct_per_prompt"]
    found = pass_at_k([sum(row) for row in rows], len(rows[0]))
    expected = case["outputs"]["metrics"]
    unbiased = {name: value for name, value in expected.items() if name.endswith("_unbiased")}
    assert {f"eval/pass_at_{k}_unbiased": value for k, value in found.items()} == pytest.approx(
        unbiased, abs=1e-15
    )


@given(st.lists(st.booleans(), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(correct: list[bool]):
    for k, value in pass_at_k([sum(correct)], len(correct)).items():
        subsets = list(combinations(correct, k))
        assert value == pytest.approx(sum(map(any, subsets)) / len(subsets))


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_the_majority_of_a_draw_is_its_most_frequent_vote_the_first_drawn_of_equals(
    votes: list[str], seed: int
):
    # Mutations: argmax over vote codes instead of positions (ties by code); counts over all samples.
    draws = np.random.default_rng(seed).integers(0, len(votes), (5, 7))
    for draw, chosen in zip(draws.tolist(), majority_samples(votes, draws).tolist(), strict=True):
        drawn = [votes[i] for i in draw]
        assert votes[chosen] == Counter(drawn).most_common(1)[0][0]  # ties: in the order of first encounter
        assert chosen == draw[drawn.index(votes[chosen])]


def test_subset_sizes_are_powers_of_two_and_the_number_itself():
    assert [subset_sizes(n) for n in (1, 2, 3, 5, 8)] == [[], [2], [2, 3], [2, 4, 5], [2, 4, 8]]


def test_one_sample_has_a_mean_and_nothing_else():
    assert prompt_metrics([0.5]) == {"mean@1": 0.5}


def test_pass_at_k_is_left_out_where_values_are_not_0_or_1():
    # Mutation: every positive reward counted as correct.
    assert "pass@1" in source_metrics({"reward": [[1.0], [0.0]]})["reward"]
    assert "pass@1" not in source_metrics({"reward": [[1.0], [0.5]]})["reward"]


def test_core_metrics_are_those_of_the_most_samples_of_acc_or_else_of_the_reward():
    # Mutations: best@2 of four samples in core; reward in core although there is acc.
    samples = {"reward": [[0.0, 1.0, 1.0, 1.0]]}
    flat = flat_metrics({"openai/gsm8k": source_metrics(samples, [["1", "2", "2", "2"]])})
    core = {name for name in flat if name.startswith("val-core/")}
    stem = "val-core/openai/gsm8k/reward"
    assert core == {f"{stem}/mean@4"} | {
        f"{stem}/{kind}@4/{of}" for kind in ("best", "maj") for of in ("mean", "std")
    }
    assert flat["val-aux/openai/gsm8k/reward/pass@1"] == 0.75
    assert {"val-aux/openai/gsm8k/reward/best@2/mean", "val-aux/openai/gsm8k/reward/std@4"} <= set(flat)
    both = flat_metrics({"a": source_metrics(samples | {"acc": [[0.0, 0.0, 0.0, 1.0]]})})
    assert both["val-core/a/acc/mean@4"] == 0.25
    assert both["val-aux/a/reward/mean@4"] == 0.75
    assert "val-core/a/reward/mean@4" not in both
