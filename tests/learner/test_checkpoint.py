"""A learner that is loaded from a checkpoint is, bit for bit, the one that wrote it; others are refused by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_program import OF_ONE, RECIPES, VERSION, config_of, dump
from flow_cases import models_of
from learner_cases import one_rank, shard_of_minibatches, uneven_groups, write_model
from safetensors.torch import load_file

from asyncrl.config import Config
from asyncrl.errors import LearnerError
from asyncrl.learner.update import PolicyLearner
from asyncrl.types import Shard


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model", "llama", tied=True)


@contextmanager
def learning(model_path: Path, config: Config, folder: Path, name: str) -> Iterator[PolicyLearner]:
    with one_rank(model_path, config, folder / f"store-{name}") as learner:
        yield learner


def shard(index: int) -> Shard:
    return shard_of_minibatches(uneven_groups(index), OF_ONE, num_epochs=1, index=index)


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("timing_s/")}


def everything(learner: PolicyLearner) -> dict[str, torch.Tensor]:
    """A copy of each parameter of every model, and of every optimizer's moments and steps."""
    critic, found = learner._models.critic, {}
    optimizers = {"policy": learner._policy_steps.optimizer._optimizer}
    if critic is not None:
        optimizers["critic"] = critic.optimizer._optimizer
    for which, module in models_of(learner).items():
        for name, parameter in module.named_parameters():
            found[f"{which}.{name}"] = parameter.to_local().detach().clone()
            for key, value in (
                optimizers[which].state.get(parameter, {}).items() if which in optimizers else ()
            ):
                found[f"{which}.{name}.{key}"] = getattr(value, "_local_tensor", value).clone()
    return found


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# Mutations caught: moments, their steps, the critic, its moments, the refreshed reference or the KL coefficient left
# out of a checkpoint or not read back.
@pytest.mark.parametrize("recipe", ["grpo", "ppo", "shared", "lora"])
def test_a_loaded_learner_trains_on_as_the_one_that_wrote_it(model_path: Path, tmp_path: Path, recipe: str):
    config = config_of(RECIPES[recipe])
    with learning(model_path, config, tmp_path, "writer") as writer:
        for index in range(VERSION):
            writer.update(shard(index))
        tmp_path.joinpath("checkpoint").mkdir()
        writer.save(tmp_path / "checkpoint", VERSION)
        at_save = everything(writer)
        expected = [numbers(writer.update(shard(index))) for index in (VERSION, VERSION + 1)]
        at_end = everything(writer)
    with learning(model_path, config, tmp_path, "reader") as reader:
        at_start = everything(reader)
        assert reader.load(tmp_path / "checkpoint") == VERSION
        assert_same_bits(everything(reader), at_save)
        assert [numbers(reader.update(shard(index))) for index in (VERSION, VERSION + 1)] == expected
        assert_same_bits(everything(reader), at_end)
    changed = [name for name, tensor in at_start.items() if not torch.equal(tensor, at_save[name])]
    assert changed, "nothing was trained: this proves nothing"
    coefficients = [m.get("actor/reward_kl_penalty_coeff") for m in expected]
    if recipe == "grpo":
        assert any(name.startswith("reference.") for name in changed)
        assert 0.2 not in coefficients


# Mutations caught: each rank reading the rows of its own number; rows offset by the rank among all copies; every copy
# writing; moments of the first rank's rows only; what ranks that share layers hold alike written by both.
def test_a_checkpoint_of_two_ranks_is_read_by_one_and_the_reverse(tmp_path: Path):
    write_model(tmp_path / "model", "llama", tied=True)
    for writer in ("by-one", "by-two", "by-copies", "by-tensor"):
        (tmp_path / writer).mkdir()
    config = config_of(RECIPES["ppo-refreshed"])
    with learning(tmp_path / "model", config, tmp_path, "one") as one:
        for index in range(VERSION):
            one.update(shard(index))
        one.save(tmp_path / "by-one", VERSION)
        dump(one, tmp_path / "one.safetensors")
    run_two_ranks(tmp_path)
    assert_same_bits(
        load_file(tmp_path / "one-read-by-two.safetensors"), load_file(tmp_path / "one.safetensors")
    )
    assert len(list((tmp_path / "by-two").glob("*.safetensors"))) == 2
    assert len(list((tmp_path / "by-copies").glob("*.safetensors"))) == 1
    assert len(list((tmp_path / "by-tensor").glob("*.safetensors"))) == 2
    for name in ("two", "copies", "tensor"):
        with learning(tmp_path / "model", config, tmp_path, f"of-{name}") as one:
            assert one.load(tmp_path / f"by-{name}") == VERSION
            dump(one, tmp_path / "found.safetensors")
        assert_same_bits(
            load_file(tmp_path / "found.safetensors"), load_file(tmp_path / f"{name}.safetensors")
        )


def run_two_ranks(folder: Path) -> None:
    program = Path(__file__).with_name("checkpoint_program.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), str(folder)], env=environment, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=180)
            assert rank.returncode == 0, errors.decode()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.fixture(scope="module")
def written(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of GRPO with adapters, after one batch. Not to be changed."""
    folder = tmp_path_factory.mktemp("written")
    with learning(model_path, config_of(RECIPES["lora"]), folder, "writer") as learner:
        learner.update(shard(0))
        learner.save(folder, 1)
    return folder


def refusal(model_path: Path, config: Config, folder: Path, store: Path) -> str:
    with learning(model_path, config, store, "refused") as learner, pytest.raises(LearnerError) as refused:
        learner.load(folder)
    return str(refused.value)


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        (
            {"learner": {"lora": {"rank": 4, "alpha": 12}}},
            ["learner.lora", "rank 3, alpha 12", "rank 4, alpha 12"],
        ),
        ({}, ["learner.lora", "rank 3", "null"]),
        (
            RECIPES["lora"] | {"algorithm": RECIPES["ppo"]["algorithm"]},
            ["algorithm.critic", "null", "a body of its own"],
        ),
        (
            {"learner": RECIPES["lora"]["learner"] | {"optimizer": "sgd"}},
            ["learner.optimizer", "adamw", "sgd"],
        ),
    ],
)
def test_a_checkpoint_of_another_recipe_is_refused_with_both_values(
    model_path: Path, tmp_path: Path, written: Path, recipe: dict[str, Any], names: list[str]
):
    # Mutation: loading what happens to have the same names.
    message = refusal(model_path, config_of(recipe), written, tmp_path)
    assert [name for name in [*names, str(written)] if name not in message] == []


def test_a_checkpoint_of_another_model_is_refused_with_both_shapes(tmp_path: Path, written: Path):
    other = write_model(tmp_path / "other", "qwen2", tied=False, hidden_size=40)
    message = refusal(other, config_of(RECIPES["lora"]), written, tmp_path)
    assert "policy/weights/transformer.model.layers.0.mlp.down_proj.lora_B.default.weight" in message
    assert "is [32, 3] in" in message
    assert "and [40, 3] in this run" in message


@pytest.mark.parametrize("damage", ["bit", "cut", "missing", "index", "format"])
def test_a_damaged_checkpoint_is_refused_by_file(
    model_path: Path, tmp_path: Path, written: Path, damage: str
):
    # Mutation: no digest (a flipped bit in a weight is trained on).
    folder = tmp_path / "checkpoint"
    shutil.copytree(written, folder)
    file, index = folder / "learner-0.safetensors", folder / "learner-0.json"
    content = file.read_bytes()
    match damage:
        case "bit":
            file.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
        case "cut":
            file.write_bytes(content[:-100])
        case "missing":
            file.unlink()
        case "index":
            index.write_bytes(index.read_bytes()[:-1])
        case _:
            index.write_text(index.read_text().replace('"format":1', '"format":2'))
    message = refusal(model_path, config_of(RECIPES["lora"]), folder, tmp_path)
    assert str(index if damage in ("index", "format") else file) in message
