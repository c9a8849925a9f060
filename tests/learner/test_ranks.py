"""Two real gloo ranks against one: the same gradients, the same weights, agreement before any FSDP collective."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from learner_cases import assert_gradients_close, plain_rows, plain_steps, uneven_groups, write_model
from rank_processes import finish_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

PROGRAM = Path(__file__).with_name("rank_program.py")
DEADLINE_S = 180


def run_ranks(folder: Path, num_ranks: int, scenario: str) -> list[dict]:
    """Runs the ranks and returns their reports."""
    folder.mkdir()
    finish_ranks(PROGRAM, num_ranks, str(folder), scenario, deadline_s=DEADLINE_S)
    return [json.loads((folder / f"report{rank}.json").read_text()) for rank in range(num_ranks)]


def whole(folder: Path, what: str, num_ranks: int) -> dict[str, torch.Tensor]:
    """Full tensors from the ranks' rows, end to end."""
    shards = [load_file(folder / f"{what}{rank}.safetensors") for rank in range(num_ranks)]
    return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}


def assert_same_metrics(one, *two):
    """Both ranks report the same bits, and the numbers of one rank; times are a rank's own."""
    of_one, first, second = (
        {name: value for name, value in report["metrics"].items() if not name.startswith("timing_s/")}
        for report in (one, *two)
    )
    assert first == second
    assert len(of_one) > 15
    assert of_one == pytest.approx(first, rel=1e-4, abs=1e-5)


# Mutations caught: gradients averaged instead of summed over ranks (half as large); each rank dividing by its own
# token count; advantages from the rank's own groups; an empty microbatch skipped (the ranks hang).
@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen2", False)])
def test_two_ranks_take_the_step_of_one(tmp_path, kind, tied):
    path = write_model(tmp_path / "model", kind, tied)
    [one] = run_ranks(tmp_path / "one", 1, "train")
    two = run_ranks(tmp_path / "two", 2, "export")
    expected = whole(tmp_path / "one", "gradients", 1)
    assert_gradients_close(expected, plain_rows(path, uneven_groups(), temperature=0.7)[1])
    assert_gradients_close(whole(tmp_path / "two", "gradients", 2), expected)
    one_weights, two_weights = whole(tmp_path / "one", "weights", 1), whole(tmp_path / "two", "weights", 2)
    for name, tensor in one_weights.items():
        torch.testing.assert_close(two_weights[name], tensor, rtol=1e-5, atol=1e-6)
    assert_same_metrics(one, *two)

    assert two[0]["row_offsets"]["model.embed_tokens.weight"] == 0
    assert two[1]["row_offsets"]["model.embed_tokens.weight"] == 34  # ceil(67 / 2)

    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "exported")
    for name, parameter in reloaded.named_parameters():
        assert torch.equal(parameter, two_weights[name]), name


# Mutations caught: a rank without a group in a mini-batch that leaves out its forward pass, or its step (the ranks
# hang); each rank dividing by its own tokens of a mini-batch; proximal log-probs of another step; `reduce` dividing
# by the tokens of one epoch on one rank.
def test_two_ranks_take_the_steps_of_one(tmp_path):
    path = write_model(tmp_path / "model", "llama", tied=True)
    [one] = run_ranks(tmp_path / "one", 1, "steps")
    two = run_ranks(tmp_path / "two", 2, "steps")
    groups = uneven_groups()
    halves = [[groups[i] for i in (0, 2, 4)], [groups[i] for i in (1, 3)]]
    expected, expected_metrics = plain_steps(path, halves, num_epochs=2, lr=0.15, temperature=0.7)
    for folder, num_ranks in ((tmp_path / "one", 1), (tmp_path / "two", 2)):
        found = whole(folder, "weights", num_ranks)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    assert expected_metrics["actor/pg_clipfrac"] > 0
    for metrics in (one["metrics"], two[0]["metrics"], two[1]["metrics"]):
        assert "timing_s/old_log_prob" in metrics
        for name, value in expected_metrics.items():
            assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert_same_metrics(one, *two)


# Mutations caught: gradients averaged over the shards of a copy only, or the norm counted once a copy (the step would
# be clipped to half); rows offset by the rank among all; every copy published.
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_copies_of_a_sharded_model_take_the_step_of_one(tmp_path, num_ranks):
    write_model(tmp_path / "model", "llama", tied=True)
    [one] = run_ranks(tmp_path / "one", 1, "train")
    ranks = run_ranks(tmp_path / "ranks", num_ranks, "replicas")
    expected, a_copy = whole(tmp_path / "one", "weights", 1), num_ranks // 2
    for first in (0, a_copy):
        shards = [load_file(tmp_path / "ranks" / f"weights{first + r}.safetensors") for r in range(a_copy)]
        for name, tensor in expected.items():
            found = torch.cat([shard[name] for shard in shards])
            torch.testing.assert_close(found, tensor, rtol=1e-5, atol=1e-6)
    for report in ranks:
        assert report["metrics"]["actor/grad_norm"] == pytest.approx(
            one["metrics"]["actor/grad_norm"], rel=1e-5
        )
    assert [report["publishes"] for report in ranks] == [True] * a_copy + [False] * a_copy
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "ranks" / "exported")
    for name, parameter in exported.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-5, atol=1e-6)


def test_ranks_with_different_plans_stop_and_name_both(tmp_path):
    # Mutation caught: entering the forward pass without agreement (the ranks would mix two batches).
    write_model(tmp_path / "model", "llama", tied=True)
    reports = run_ranks(tmp_path / "ranks", 2, "disagree")
    for report, own in zip(reports, (4, 5), strict=True):
        assert "different plans: batch 4 and 5" in report["error"]
        assert f"this rank has batch {own}" in report["error"]
