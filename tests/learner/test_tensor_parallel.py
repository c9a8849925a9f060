"""Ranks that share layers train what one rank trains: two of them, and two such pairs with data of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from flow_cases import write_models
from learner_cases import assert_gradients_close, write_model
from safetensors.torch import load_file
from tensor_program import CASES, WORLDS
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaModel

from asyncrl.errors import LearnerError
from asyncrl.learner.tensor_parallel import PLAN, plan_for

PROGRAM = Path(__file__).with_name("tensor_program.py")
DEADLINE_S = 300


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every world has one with what its ranks trained."""
    folder = tmp_path_factory.mktemp("tensor")
    write_models(folder)
    write_model(folder / "qwen3", "qwen3", tied=False)
    program = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, errors = program.communicate(timeout=DEADLINE_S)
        assert program.returncode == 0, errors.decode()
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
    return folder


def of_rank(
    trained: Path, world: str, name: str, rank: int
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    metrics = json.loads((trained / world / f"report-{rank}.json").read_text())[name]
    return metrics, load_file(trained / world / f"{name}-{rank}.safetensors")


# Mutations caught: a tensor group's tokens, KL or moments counted twice (metrics), its gradients divided by all ranks
# instead of the data ranks (half as large); the head's or a q_norm's gradient of one rank's share only, or not scaled;
# squares of the norms or of the embedding counted on both ranks (grad_norm); a rank that trains another shard than its
# neighbour (the ranks hang or differ); moments of rows that are another rank's; a reference that is not cut.
@pytest.mark.parametrize(
    ("world", "name"), [*product(("pair", "pairs"), CASES), ("copies", "llama")], ids=lambda part: part
)
def test_ranks_that_share_layers_train_what_one_rank_trains(trained: Path, world: str, name: str):
    expected_metrics, expected = of_rank(trained, "one", name, 0)
    metrics, found = of_rank(trained, world, name, 0)
    assert metrics == pytest.approx(expected_metrics, rel=1e-3, abs=1e-5)
    torch.testing.assert_close(found["logprobs"], expected["logprobs"], rtol=1e-5, atol=1e-5)
    is_change = "moment of" if name == "adamw" else "change of"  # plain gradient descent shows every gradient
    trains = {
        tensor
        for tensor in expected
        if tensor.startswith(is_change) and not tensor.startswith("change of reference")
    }
    assert len(trains) >= 20
    assert_gradients_close({t: found[t] for t in trains}, {t: expected[t] for t in trains}, rtol=2e-4)
    for tensor, value in expected.items():
        torch.testing.assert_close(
            found[tensor], value, rtol=1e-3, atol=5e-5, msg=lambda m, t=tensor: f"{t}: {m}"
        )
    for rank in range(1, WORLDS[world][0]):
        own_metrics, own = of_rank(trained, world, name, rank)
        assert own_metrics == metrics
        assert set(own) == set(found)
        # What every tensor rank has whole stays the same bits.
        assert all(torch.equal(own[tensor], found[tensor]) for tensor in found)


# Mutations caught: columns published as rows, or of one rank only; rows of the second tensor rank at the offset of the
# first; rows written by both (with other values they would differ); a rank's own rows exported twice.
@pytest.mark.parametrize("world", WORLDS)
def test_the_published_and_exported_version_is_the_trained_one_bit_for_bit(trained: Path, world: str):
    _, found = of_rank(trained, world, "llama", 0)
    folder = trained / world
    published = load_file(folder / "published.safetensors")
    assert {f"policy.transformer.{name}" for name in published} == {
        name for name in found if name.startswith("policy.")
    }
    for name, tensor in published.items():
        assert torch.equal(tensor, found[f"policy.transformer.{name}"]), name
    exported = AutoModelForCausalLM.from_pretrained(folder / "exported")
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, published[name]), name


def llama(intermediate_size: int = 48) -> LlamaModel:
    """One layer, six heads, two key heads."""
    return LlamaModel(
        LlamaConfig(
            vocab_size=11,
            hidden_size=24,
            intermediate_size=intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=6,
            num_key_value_heads=2,
        )
    )


def test_a_model_that_cannot_be_cut_is_refused_by_name():
    assert plan_for(llama(), 2)["layers.*.mlp.down_proj"] == "rowwise"
    with pytest.raises(
        LearnerError, match="tensor_parallel_size 3 does not divide the model's num_key_value_heads 2"
    ):
        plan_for(llama(), 3)
    with pytest.raises(LearnerError, match=r"2 does not divide layers\.0\.mlp\.gate_proj's width 47"):
        plan_for(llama(intermediate_size=47), 2)
    model = llama()
    setattr(model.config, PLAN, {"layers.*.mlp.up_proj": "packed_colwise"})
    with pytest.raises(LearnerError, match=r"asks for 'packed_colwise' of layers\.\*\.mlp\.up_proj"):
        plan_for(model, 2)
    plan = {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}
    setattr(model.config, PLAN, plan)
    with pytest.raises(
        LearnerError, match=r"does not name its layers\.0\.self_attn\.k_proj\.weight \[8, 24\]"
    ):
        plan_for(model, 2)
    setattr(model.config, PLAN, None)
    with pytest.raises(LearnerError, match="llama has no plan for tensor parallelism"):
        plan_for(model, 2)
