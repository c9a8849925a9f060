"""The recipes of test_checkpoint.py, and one of its two ranks: checkpoint_program.py RANK FOLDER.

FOLDER/by-one was written by one rank: read it, and dump it as `one-read-by-two`. Then train, dump as `two`, and write
FOLDER/by-two; then the same with two copies of the model, of one rank each (`copies`, FOLDER/by-copies), and with two
ranks that share each layer (`tensor`, FOLDER/by-tensor).
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from learner_cases import shard_of_minibatches, uneven_groups
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from asyncrl.config import Config
from asyncrl.learner.mesh import make_mesh
from asyncrl.learner.update import PolicyLearner

VERSION = 2
RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {
        "algorithm": {
            "kl_reward": {"type": "adaptive", "coef": 0.2, "target": 0.01, "horizon": 30},
            "reference": {"refresh_every": 2},
        }
    },
    "ppo": {"algorithm": {"type": "ppo", "critic": {"lr": 0.01, "warmup_versions": 1}}},
    "ppo-refreshed": {
        "algorithm": {
            "type": "ppo",
            "critic": {"lr": 0.01},
            "kl_reward": {},
            "reference": {"refresh_every": 2},
        }
    },
    "shared": {"algorithm": {"type": "ppo", "critic": {"shared": True}}},
    "lora": {"learner": {"lora": {"rank": 3, "alpha": 12}}},
}
OF_ONE = [[[[0, 2, 4]]], [[[1, 3]]]]
OF_TWO = [[[[4], [0]], [[2], []]], [[[], []], [[3], [1]]]]


def config_of(recipe: dict[str, Any], **learner: Any) -> Config:
    table = {"lr": 0.02, "minibatches": 2, "logprob_chunk_tokens": 7} | recipe.get("learner", {}) | learner
    tree = {"rollout": {"temperature": 0.7, "max_completion_tokens": 16}, "learner": table}
    return Config.model_validate(tree | ({"algorithm": recipe["algorithm"]} if "algorithm" in recipe else {}))


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store-two'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    for name, replicas, tensor in (("two", 1, 1), ("copies", 2, 1), ("tensor", 1, 2)):
        config = config_of(
            RECIPES["ppo-refreshed"], num_ranks=2, replicas=replicas, tensor_parallel_size=tensor
        )
        learner = PolicyLearner(folder / "model", config, mesh=make_mesh("cpu", 2, replicas, tensor))
        if name == "two":
            learner.load(folder / "by-one")
            dump(learner, folder / "one-read-by-two.safetensors")
            learner = PolicyLearner(folder / "model", config, mesh=make_mesh("cpu", 2))
        for index in range(VERSION):
            split, data_rank = (OF_TWO, rank) if tensor == 1 else (OF_ONE, 0)
            learner.update(shard_of_minibatches(uneven_groups(index), split, rank=data_rank, index=index))
        dump(learner, folder / f"{name}.safetensors")
        learner.save(folder / f"by-{name}", VERSION)
    dist.barrier()
    dist.destroy_process_group()


def dump(learner: PolicyLearner, file: Path) -> None:
    """Every full tensor that a batch changes. Collective."""
    found: dict[str, torch.Tensor] = {}
    for which, part in learner._parts().items():
        kept = dict(part.parameters) | ({} if part.optimizer is None else part.optimizer.moments())
        for name, tensor in kept.items():
            assert isinstance(tensor, DTensor)
            found[f"{which}.{name}"] = tensor.full_tensor().detach().clone()
    if dist.get_rank() == 0:
        save_file(found, file)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
