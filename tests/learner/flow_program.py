"""One rank of test_flow.py, every scenario anew: flow_program.py RANK NUM_RANKS FOLDER SPLIT."""

from __future__ import annotations

import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from flow_cases import HALVES, SCENARIOS, groups_of, random_heads, shard_for, trained_weights
from safetensors.torch import save_file

from asyncrl.learner.mesh import make_mesh
from asyncrl.learner.update import PolicyLearner


def main(rank: int, num_ranks: int, folder: Path, split: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / f'store-{split}'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    mesh = make_mesh("cpu", num_ranks)
    reports: dict[str, dict[str, float] | str] = {}
    model_path = folder / "model"
    for name, scenario in SCENARIOS.items():
        try:
            with random_heads():
                learner = PolicyLearner(model_path, scenario.config(model_path), mesh=mesh)
            groups = groups_of(scenario, model_path)
            reports[name] = learner.update(shard_for(scenario, groups, HALVES[split], rank))
            save_file(trained_weights(learner), folder / f"{name}-{split}-{rank}.safetensors")
        except Exception:  # the same on every rank: the others go on
            reports[name] = traceback.format_exc()
    (folder / f"report-{split}-{rank}.json").write_text(json.dumps(reports))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
