"""Which trajectories an evaluation's numbers are over, and under which names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncrl.config import Config, load_config
from asyncrl.envs.eval_report import evaluate
from asyncrl.types import Status, Trajectory, TrajectoryGroup


def config(*overrides: str) -> Config:
    return load_config(None, ["data.eval=rev4", "eval.every=1", "eval.temperature=1.0", *overrides])


def sample(reward: float | None, text: str = "", **components: float) -> Trajectory:
    status = Status.SCORED if reward is not None else Status.REWARD_FAILED
    ones = np.ones(3, np.int32)
    return Trajectory(
        ones,
        np.ones(3, np.uint8),
        np.zeros(3, np.float32),
        ones,
        reward,
        status,
        "length",
        text=text,
        reward_components=components,
    )


def group(ordinal: int, *samples: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(ordinal, 0, np.ones(1, np.int32), list(samples))


def test_sources_are_reported_apart_and_rows_without_one_are_unknown_as_in_verl():
    prompts = [
        ({"data_source": "openai/gsm8k"}, group(0, sample(1.0))),
        ({"data_source": "openai/gsm8k"}, group(1, sample(0.0))),
        ({}, group(2, sample(1.0))),
    ]
    report = evaluate(prompts, config())
    assert report.metrics["val-core/openai/gsm8k/reward/mean@1"] == 0.5
    assert report.metrics["val-core/unknown/reward/mean@1"] == 1.0
    assert report.metrics["val-aux/response_length/mean"] == 3.0
    assert report.metrics["val-aux/response_length/clip_ratio"] == 1.0
    assert report.headline() == "openai/gsm8k mean@1 0.500, unknown mean@1 1.000 (3 prompts)"


def test_a_prompt_with_a_failed_reward_is_left_out_and_counted_never_a_0():
    # Mutations: failed = 0 (mean 0.5); only the failed sample left out (mean@1 beside mean@2).
    prompts: list[tuple[dict[str, Any], TrajectoryGroup]] = [
        ({}, group(0, sample(1.0), sample(1.0))),
        ({}, group(1, sample(None), sample(0.0))),
    ]
    report = evaluate(prompts, config("eval.num_samples=2"))
    assert report.metrics["val-core/unknown/reward/mean@2"] == 1.0
    assert [name for name in report.metrics if "mean@1" in name] == []
    assert (report.num_prompts, report.num_left_out) == (1, 1)
    assert report.headline() == "mean@2 1.000 (1 prompts, 1 left out: no reward)"


def test_an_evaluation_without_any_reward_has_no_numbers():
    report = evaluate([({}, group(0, sample(None)))], config())
    assert [name for name in report.metrics if name.startswith("val-core")] == []
    assert report.headline() == "no numbers (0 prompts, 1 left out: no reward)"


@pytest.mark.parametrize(
    ("reward", "source", "has_votes"),
    [
        ("gsm8k_flexible", "a", True),
        ("{name: gsm8k_strict, data_source: [a]}", "a", True),
        ("{name: gsm8k_strict, data_source: [b]}", "a", False),
        ("exact_match", "a", False),
    ],
)
def test_majorities_are_over_the_numbers_that_a_gsm8k_reward_reads_in_the_text(
    reward: str, source: str, has_votes: bool
):
    # Mutation: votes by text: "#### 3" and "#### 3.0" would be two answers, and the majority of 3 samples "#### 4".
    texts = ["#### 3", "#### 3.0", "#### 4"]
    samples = [sample(1.0, texts[0]), sample(1.0, texts[1]), sample(0.0, texts[2])]
    report = evaluate(
        [({"data_source": source}, group(0, *samples))], config(f"reward=[{reward}]", "eval.num_samples=3")
    )
    name = f"val-core/{source}/reward/maj@3/mean"
    assert (name in report.metrics) is has_votes
    if has_votes:
        apart = evaluate(
            [({}, group(0, sample(1.0, "3"), sample(1.0, "5"), sample(0.0, "4")))],
            config("reward=gsm8k_flexible", "eval.num_samples=3"),
        ).metrics["val-core/unknown/reward/maj@3/mean"]
        assert report.metrics[name] > apart


def test_a_single_rewards_own_numbers_go_by_their_keys_and_its_pred_is_the_vote():
    # Mutations: `<reward>/acc` as a variable; pred averaged like a number.
    samples = [
        sample(0.2, "", **{"r.py": 0.2, "r.py/acc": 1.0, "r.py/pred": 7.0}),
        sample(0.4, "", **{"r.py": 0.4, "r.py/acc": 0.0, "r.py/pred": 7.0}),
    ]
    metrics = evaluate([({}, group(0, *samples))], config("eval.num_samples=2")).metrics
    assert metrics["val-core/unknown/acc/mean@2"] == 0.5
    assert metrics["val-core/unknown/acc/maj@2/mean"] == pytest.approx(0.5, abs=0.05)
    assert metrics["val-aux/unknown/reward/mean@2"] == pytest.approx(0.3)
    assert [name for name in metrics if "pred" in name or "r.py" in name] == []


def test_the_answer_of_one_of_several_rewards_is_the_vote():
    # Mutations: only a single reward's answer counts; answers averaged like numbers; a reward called pred is one.
    samples = [
        sample(1.0, **{"r": 1.0, "r/pred": 7.0, "pred": 0.5}),
        sample(1.0, **{"r": 1.0, "r/pred": 7.0, "pred": 0.5}),
        sample(0.0, **{"r": 0.0, "r/pred": 8.0, "pred": 0.5}),
    ]
    metrics = evaluate([({}, group(0, *samples))], config("eval.num_samples=3")).metrics
    assert metrics["val-core/unknown/reward/maj@3/mean"] > metrics["val-core/unknown/reward/mean@3"]
    assert metrics["val-aux/unknown/pred/mean@3"] == 0.5
    assert [name for name in metrics if "r/pred" in name] == []


def test_several_rewards_are_reported_each():
    metrics = evaluate(
        [({}, group(0, sample(1.5, exact_match=1.0, brevity=0.5)))],
        config("reward=[exact_match, gsm8k_strict]"),
    ).metrics
    assert metrics["val-core/unknown/reward/mean@1"] == 1.5
    assert metrics["val-aux/unknown/exact_match/mean@1"] == 1.0
    assert metrics["val-aux/unknown/brevity/mean@1"] == 0.5
