"""What a person reads of a version."""

from __future__ import annotations

import pytest

from asyncrl.launch.console import line, short, sparkline


@pytest.mark.parametrize(
    ("reward", "shown"),
    [
        (0.0, "0.000"),
        (0.25, "0.250"),
        (-1.5, "-1.500"),
        (0.01, "0.010"),
        (0.0004, "0.0004"),
        (-0.00312, "-0.0031"),
    ],
)
def test_a_reward_too_small_for_three_decimals_is_not_shown_as_zero(reward: float, shown: str):
    # Mutation: three decimals always -> a reward that rises from 0.0001 to 0.0004 looks dead.
    assert short(reward) == shown


def test_a_version_is_one_line_in_fixed_order():
    # Mutation: learner and rollout servers exchanged.
    metrics = {
        "training/policy_version": 3.0,
        "critic/score/mean": 0.5,
        "actor/pg_loss": -0.01,
        "staleness/mean": 1.25,
        "staleness/max": 2.0,
        "rollout/tokens_per_s": 41.7,
        "timing_s/step": 7.126,
        "idle/learner": 0.25,
        "idle/rollout": 0.5,
    }
    assert line(metrics, 16) == (
        "version    3/16  reward 0.500  loss -0.0100  staleness 1.25 max 2  42 tok/s  step 7.13 s  "
        "learner waits 25%, rollout servers idle 50%"
    )


def test_a_curve_runs_from_its_lowest_to_its_highest_value():
    # Mutations: bars from 0 -> equal rewards would be full bars; the newest first.
    assert sparkline([0.2, 0.3, 0.9]) == "▁▂█"
    assert sparkline([0.7, 0.7]) == "▁▁"
    assert sparkline([]) == ""
