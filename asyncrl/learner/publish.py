"""One version's way out of the learner: check, announce, write the snapshot, hash it, publish its manifest.

Called by the learner loop on every rank, on the main thread, between one batch and the next.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from asyncrl.config import Config
from asyncrl.dtypes import publish_dtype
from asyncrl.learner.update import PolicyLearner
from asyncrl.types import Span
from asyncrl.weight_sync.manifest import Manifest, lay_out
from asyncrl.weight_sync.snapshot import SnapshotWriter

DIGEST_BYTES = 32


class SnapshotPublisher:
    """Writes one snapshot file a version; keeps the newest finished one and unlinks the one before it."""

    def __init__(
        self, learner: PolicyLearner, config: Config, device: torch.device, *, run: str, incarnation: str
    ) -> None:
        self._learner = learner
        self._device = device
        self._incarnation = incarnation
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._dtype = publish_dtype(config, device.type)
        self._writer = SnapshotWriter(config.weight_sync.dir, run)
        self._tensors = [(shard.name, tuple(shard.shape)) for shard in learner.named_shards()]
        self._finished_version: int | None = None

    def write(self, version: int) -> tuple[str, Manifest, list[Span]]:
        """Collective. Returns the finished file, its manifest with digests, and how long it took.

        The announcement of `version` must have been recorded. Every rank writes the rows it holds, and
        hashes its share of the tensors once all rows are there.
        """
        start_s = time.monotonic()
        itemsize = getattr(torch, self._dtype).itemsize
        layout = lay_out(
            ((name, shape, self._dtype, itemsize) for name, shape in self._tensors),
            self._incarnation,
            version,
        )
        path = self._writer.path(layout)
        if self._rank == 0:
            self._writer.create(layout)
        dist.barrier()
        if self._rank != 0:
            self._writer.open(layout)
        for entry, shard in zip(layout.tensors, self._learner.named_shards(), strict=True):
            if shard.rows.numel() and self._learner.publishes:
                self._writer.write_rows(entry, shard.row_offset, shard.rows)
        dist.barrier()
        written_s = time.monotonic()
        digests = self._digest(layout)
        manifest = self._writer.finish(digests)
        if self._rank == 0 and self._finished_version is not None:
            self._writer.unlink(self._incarnation, self._finished_version)
        self._finished_version = version
        fields = {"version": version, "bytes": layout.total_bytes}
        return (
            path,
            manifest,
            [
                Span("write", start_s, written_s, fields),
                Span("publish", start_s, time.monotonic(), fields),
            ],
        )

    def close(self) -> None:
        """Unlinks the newest snapshot: the run is over."""
        self._writer.close()
        if self._rank == 0 and self._finished_version is not None:
            self._writer.unlink(self._incarnation, self._finished_version)

    def _digest(self, layout: Manifest) -> dict[str, str]:
        """Every tensor's digest on every rank: each rank hashes its share, a sum with zeros joins them."""
        digests = torch.zeros(len(layout.tensors), DIGEST_BYTES, dtype=torch.uint8)
        mine = layout.tensors[self._rank :: self._num_ranks]
        hashed = self._writer.digest(mine)
        for index in range(self._rank, len(layout.tensors), self._num_ranks):
            raw = bytes.fromhex(hashed[layout.tensors[index].name])
            digests[index] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        digests = digests.to(self._device)
        dist.all_reduce(digests)
        return {
            entry.name: bytes(row).hex() for entry, row in zip(layout.tensors, digests.tolist(), strict=True)
        }
