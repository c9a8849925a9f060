"""Every recipe and option trains the same weights and reports the same numbers on one rank and on two.

Two ranks have their groups in several microbatches, empty ones among them; test_policy_steps.py and its neighbours
compare one rank with plain loops.
"""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path

import pytest
import torch
from flow_cases import SCENARIOS, write_models
from rank_processes import finish_ranks
from safetensors.torch import load_file

PROGRAM = Path(__file__).with_name("flow_program.py")
DEADLINE_S = 500


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every scenario was trained whole by one rank, and in pieces by two."""
    folder = tmp_path_factory.mktemp("flow")
    write_models(folder)
    for num_ranks, split in ((1, "whole"), (2, "ranks")):
        finish_ranks(PROGRAM, num_ranks, str(folder), split, deadline_s=DEADLINE_S)
    return folder


def report(folder: Path, split: str, name: str, rank: int = 0) -> dict[str, float]:
    found = json.loads((folder / f"report-{split}-{rank}.json").read_text())[name]
    assert isinstance(found, dict), found
    return {metric: value for metric, value in found.items() if not metric.startswith("timing_s/")}


def weights_of(folder: Path, split: str, name: str) -> dict[str, torch.Tensor]:
    num_ranks = 2 if split == "ranks" else 1
    shards = [load_file(folder / f"{name}-{split}-{rank}.safetensors") for rank in range(num_ranks)]
    return {tensor: torch.cat([shard[tensor] for shard in shards]) for tensor in shards[0]}


# Mutations caught: see the comments of test_ranks.py and test_minibatches.py; and: a choice of tokens on each rank
# alone, or in the order of the ranks; moments, M2PO's cut or the mean weight of a rank's own tokens; the KL that the
# controller sees not reduced; a denominator of one rank's kept tokens; early stop by one rank's KL (the ranks hang).
@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_train_the_weights_of_one_and_report_the_same_numbers(trained: Path, name: str):
    expected = weights_of(trained, "whole", name)
    metrics = report(trained, "whole", name)
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    assert report(trained, "ranks", name) == report(trained, "ranks", name, rank=1)
    found = weights_of(trained, "ranks", name)
    assert set(found) == set(expected)
    for tensor, value in expected.items():
        torch.testing.assert_close(found[tensor], value, rtol=1e-4, atol=2e-6, msg=tensor)
    assert report(trained, "ranks", name) == pytest.approx(metrics, rel=1e-3, abs=1e-5)


def test_every_scenario_trains_something_of_its_own(trained: Path):
    # Else a scenario whose option is not read would agree with itself.
    flat = {
        name: torch.cat([value.flatten() for value in weights_of(trained, "whole", name).values()])
        for name in SCENARIOS
    }
    equal = [
        (one, other)
        for one, other in combinations(SCENARIOS, 2)
        if flat[one].shape == flat[other].shape and torch.equal(flat[one], flat[other])
    ]
    assert equal == [("token-mean", "recipe-grpo")]


def test_a_refreshed_reference_is_the_policy_that_was_trained(trained: Path):
    # Mutation caught: the weights before the steps; a refresh while FSDP's root is gathered (an error).
    found = weights_of(trained, "ranks", "ppo-refreshed")
    other = weights_of(trained, "ranks", "ppo-kl")
    for name in [name.removeprefix("reference.") for name in found if name.startswith("reference.")]:
        assert torch.equal(found[f"reference.{name}"], found[f"policy.{name}"])
        assert not torch.equal(other[f"reference.{name}"], other[f"policy.{name}"])
