"""The ranks of test_tensor_parallel.py, one world after another: tensor_program.py FOLDER."""

from __future__ import annotations

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from flow_cases import INDEX, SCENARIOS, Scenario, groups_of, models_of, random_heads, shard_for
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from asyncrl.learner.mesh import data_rank, make_mesh, num_data_ranks
from asyncrl.learner.packing import pack
from asyncrl.learner.publish import SnapshotPublisher
from asyncrl.learner.update import PolicyLearner
from asyncrl.weight_sync.snapshot import map_readonly

CASES: dict[str, tuple[str, Scenario, dict[str, Any]]] = {
    "llama": ("model", Scenario({}), {"activation_checkpointing": "full"}),
    "qwen3": ("qwen3", Scenario({}), {}),
    "adamw": ("qwen3", Scenario({}, num_epochs=1, lr=1e-4), {"optimizer": "adamw"}),
    "critic": (
        "model",
        Scenario(
            {
                "type": "ppo",
                "critic": {"lr": 0.5},
                "kl_reward": {"coef": 0.2},
                "reference": {"refresh_every": INDEX + 1},
            }
        ),
        {},
    ),
    "shared-critic": ("model", SCENARIOS["ppo-shared"], {}),
    "entropy": ("model", SCENARIOS["entropy"], {}),
    "optimal-baseline": ("model", SCENARIOS["otb"], {}),
}
"""Name -> (folder of the model, what is trained, options of the learner)."""
SPLITS: dict[int, list[list[list[list[int]]]]] = {
    1: [[[[0, 2, 4]]], [[[1, 3]]]],
    2: [[[[4], [0]], [[2], []]], [[[], []], [[3], [1]]]],
}
"""[number of data ranks] -> [mini-batch][data rank][microbatch] -> positions."""
WORLDS = {"one": (1, 1, 1), "pair": (2, 1, 2), "pairs": (4, 1, 2), "copies": (4, 2, 2)}
"""Name -> (ranks, copies of the model, ranks that share layers)."""
VERSION = 5


def train(name: str, models: Path, folder: Path, mesh: DeviceMesh) -> dict[str, float]:
    """Trains the case. What this rank has of it, and of "llama" the published version, is written to `folder`."""
    of_model, scenario, options = CASES[name]
    config = scenario.config(models / "model")
    learner_config = config.learner.model_copy(update=options)
    weight_sync = config.weight_sync.model_copy(update={"dir": str(folder)})
    config = config.model_copy(update={"learner": learner_config, "weight_sync": weight_sync})
    with random_heads():
        learner = PolicyLearner(models / of_model, config, mesh=mesh)
    groups = groups_of(scenario, models / "model")
    with torch.no_grad():
        logprobs = learner._models.policy(pack(groups, torch.device("cpu"))).logprobs
    learner._models.reshard()
    before = whole_tensors(learner)
    metrics = learner.update(shard_for(scenario, groups, SPLITS[num_data_ranks(mesh)], data_rank(mesh)))
    learner.check_finite()
    after = whole_tensors(learner)
    found = {"logprobs": logprobs.clone()} | after
    found |= {f"change of {tensor}": after[tensor] - before[tensor] for tensor in after}
    found |= moments(learner)
    save_file(found, folder / f"{name}-{dist.get_rank()}.safetensors")
    if name == "llama":
        publish(learner, config, folder)
        learner.export(folder / "exported")
    return {metric: value for metric, value in metrics.items() if not metric.startswith("timing_s/")}


def whole_tensors(learner: PolicyLearner) -> dict[str, Tensor]:
    """Of all its models, as torch puts them together. Collective."""
    return {
        f"{which}.{name}": whole(parameter)
        for which, module in models_of(learner).items()
        for name, parameter in module.named_parameters()
    }


def moments(learner: PolicyLearner) -> dict[str, Tensor]:
    """AdamW's mean gradients of the policy."""
    optimizer = learner._policy_steps.optimizer
    return {
        f"moment of {name}": whole(optimizer._optimizer.state[parameter]["exp_avg"])
        for name, parameter in optimizer.parameters.items()
        if "exp_avg" in optimizer._optimizer.state[parameter]
    }


def whole(sharded: Tensor) -> Tensor:
    assert isinstance(sharded, DTensor)
    return sharded.full_tensor().detach().clone().contiguous()


def publish(learner: PolicyLearner, config: Any, folder: Path) -> None:
    """Writes the version, and what its file holds to published.safetensors."""
    publisher = SnapshotPublisher(learner, config, torch.device("cpu"), run="run", incarnation="one")
    try:
        path, manifest, _ = publisher.write(VERSION)
        with map_readonly(path, manifest) as tensors:
            found = {name: tensor.clone() for name, tensor in tensors}
        if dist.get_rank() == 0:
            save_file(found, folder / "published.safetensors")
        dist.barrier()
    finally:
        publisher.close()


def run_rank(world: str, rank: int, folder: Path) -> None:
    """A rank's whole life."""
    torch.set_num_threads(1)
    num_ranks, replicas, size = WORLDS[world]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / world / 'store'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    mesh = make_mesh("cpu", num_ranks, replicas, size)
    names = ("llama",) if world == "copies" else CASES
    reports = {name: train(name, folder, folder / world, mesh) for name in names}
    (folder / world / f"report-{rank}.json").write_text(json.dumps(reports))
    dist.barrier()
    dist.destroy_process_group()


def fork_rank(world: str, rank: int, folder: Path) -> int:
    """The process id of a rank: a child that has imported torch already, which takes longer than to train."""
    if child := os.fork():
        return child
    try:
        run_rank(world, rank, folder)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(folder: Path) -> None:
    for world, (num_ranks, _, _) in WORLDS.items():
        (folder / world).mkdir()
        children = [fork_rank(world, rank, folder) for rank in range(num_ranks)]
        failed = [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1]]
        if failed:
            sys.exit(f"ranks {failed} of the world {world!r} failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
