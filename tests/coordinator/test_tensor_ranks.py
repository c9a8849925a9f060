"""The ranks of a tensor group get the same share of a batch."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
from scripted_peers import make_group

from asyncrl.config import load_config
from asyncrl.coordinator.batches import mask_group
from asyncrl.coordinator.learner_side import LearnerSide
from asyncrl.stream.messages import Batch


class SentBatches:
    """A mailbox that keeps what is sent: peer -> (message, ordinals of its groups)."""

    def __init__(self) -> None:
        self.of_peer: dict[bytes, tuple[Batch, list[int]]] = {}

    async def send(self, peer: bytes, body: Batch, *, groups: list[Any]) -> None:
        self.of_peer[peer] = body, [group.ordinal for group in groups]


def test_neighbouring_ranks_get_one_data_ranks_share():
    # Mutations: a share for every rank (two of four are missing in the plan); ranks 0 and 2 as a group.
    overrides = ["num_ranks=4", "tensor_parallel_size=2", "prompts_per_batch=3"]
    config = load_config(None, [f"learner.{override}" for override in overrides])
    mailbox: Any = SentBatches()
    unused: Any = SimpleNamespace(counts={"batches_equal_rewards": 0}, note=print)
    side = LearnerSide(config, unused, unused, mailbox, unused, unused, unused, hidden_size=8)
    side.ranks = {rank: b"%d" % rank for rank in (2, 0, 3, 1)}
    groups = [make_group(ordinal, np.zeros(2, np.int32), version=0) for ordinal in range(3)]
    masked = [mask_group(group, batch_index=0, max_staleness=0, over_age="mask") for group in groups]
    asyncio.run(side._send_batch(0, masked))
    [(first, mine), (second, same), (third, others), (fourth, also_others)] = (
        mailbox.of_peer[b"%d" % rank] for rank in range(4)
    )
    assert [batch.rank for batch in (first, second, third, fourth)] == [0, 0, 1, 1]
    assert first.plan.num_ranks == 2
    assert mine == same == [first.plan.ordinals[p] for p in first.plan.positions_of(0)]
    assert others == also_others
    assert sorted(mine + others) == [0, 1, 2]
