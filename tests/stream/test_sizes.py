"""How large messages get: never less than what the plans of full-length batches put on one rank."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.config import load_config
from asyncrl.coordinator.batches import plan_batch
from asyncrl.stream.sizes import max_group_bytes, max_shard_bytes
from asyncrl.types import Status, Trajectory, TrajectoryGroup


def equal_groups(num_groups: int) -> list[TrajectoryGroup]:
    ids = np.zeros(3, np.int32)
    trajectory = Trajectory(
        ids, np.ones(3, np.uint8), np.zeros(3, np.float32), ids, 0.0, Status.SCORED, "stop"
    )
    return [TrajectoryGroup(ordinal, 0, ids, [trajectory] * 2) for ordinal in range(num_groups)]


# Mutation: an even share of the whole batch, rounded up once -> with mini-batches of one group (16 of 16, 2 ranks)
# rank 0 gets all 16 groups and 8 were reckoned with, so a run ends at its first batch with a message too large.
@pytest.mark.parametrize(
    ("num_prompts", "num_minibatches", "num_ranks", "most"),
    [(16, 1, 1, 16), (16, 1, 2, 8), (16, 16, 2, 16), (16, 5, 2, 10), (7, 3, 4, 3), (8, 2, 8, 2)],
)
def test_a_ranks_share_is_rounded_up_in_every_mini_batch(
    num_prompts: int, num_minibatches: int, num_ranks: int, most: int
):
    plan = plan_batch(
        0, equal_groups(num_prompts), num_ranks=num_ranks, max_tokens=1000, num_minibatches=num_minibatches
    )
    assert max(len(plan.positions_of(rank)) for rank in range(num_ranks)) == most
    overrides = [
        f"prompts_per_batch={num_prompts}",
        f"minibatches={num_minibatches}",
        f"num_ranks={num_ranks}",
    ]
    config = load_config(None, [f"learner.{override}" for override in overrides])
    assert max_shard_bytes(config) == most * max_group_bytes(config)
    overrides[-1] = f"num_ranks={2 * num_ranks}"  # each share goes to two ranks that share layers
    paired = load_config(None, ["learner.tensor_parallel_size=2", *(f"learner.{o}" for o in overrides)])
    assert max_shard_bytes(paired) == most * max_group_bytes(config)
