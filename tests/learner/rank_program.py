"""One rank of the tests in test_ranks.py: python rank_program.py RANK NUM_RANKS FOLDER SCENARIO.

Scenarios: `train` updates once and writes gradients, weights and metrics; `steps` does so with two mini-batches
and two epochs; `disagree` gives rank 1 another plan; `export` updates once and exports; `replicas` does so with two
copies of the model.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from learner_cases import record_gradients, sgd_config, shard_of_minibatches, uneven_groups
from safetensors.torch import save_file

from asyncrl.errors import LearnerError
from asyncrl.learner.mesh import make_mesh
from asyncrl.learner.update import PolicyLearner

WHOLE = {
    1: [[[[0, 1, 2, 3, 4]]]],
    2: [[[[4, 1], [], [0]], [[2], [3], []]]],
    4: [[[[4], [1]], [[0], []], [[], []], [[2], [3]]]],
}
HALVES = {1: [[[[0, 2, 4]]], [[[1, 3]]]], 2: [[[[4], [0]], [[2], []]], [[[], []], [[3], [1]]]]}
"""[number of ranks] -> [mini-batch][rank][microbatch] -> positions; rank 0 has nothing of the second half."""


def main(rank: int, num_ranks: int, folder: Path, scenario: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    in_steps = scenario == "steps"
    config = sgd_config(lr=0.15 if in_steps else 0.5)
    mesh = make_mesh("cpu", num_ranks, replicas=2 if scenario == "replicas" else 1)
    learner = PolicyLearner(folder.parent / "model", config, mesh=mesh)
    index = 5 if scenario == "disagree" and rank == 1 else 4
    minibatches = (HALVES if in_steps else WHOLE)[num_ranks]
    shard = shard_of_minibatches(
        uneven_groups(), minibatches, num_epochs=2 if in_steps else 1, rank=rank, index=index
    )
    gradients = record_gradients(learner)
    report: dict[str, object] = {}
    try:
        report["metrics"] = learner.update(shard)
    except LearnerError as error:
        report["error"] = str(error)
    shards = {s.name: s for s in learner.named_shards()}
    report["row_offsets"] = {name: s.row_offset for name, s in shards.items()}
    save_file(gradients, folder / f"gradients{rank}.safetensors")
    save_file(
        {name: s.rows.contiguous() for name, s in shards.items()}, folder / f"weights{rank}.safetensors"
    )
    (folder / f"report{rank}.json").write_text(json.dumps(report))
    report["publishes"] = learner.publishes
    (folder / f"report{rank}.json").write_text(json.dumps(report))
    if scenario in ("export", "replicas"):
        learner.export(folder / "exported")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
