"""The `shm` transport: nothing is copied, the server verifies the learner's own file. One node only."""

from __future__ import annotations

import asyncio

from asyncrl.weight_sync.manifest import Manifest
from asyncrl.weight_sync.snapshot import verify


class ShmTransport:
    """Implements Transport for servers on the learner's node."""

    def __init__(self, *, max_threads: int = 1) -> None:
        """`max_threads`: threads that hash the file; they share the server's cores with its engine."""
        self._max_threads = max_threads

    async def stage(self, path: str, manifest: Manifest) -> str:
        await asyncio.to_thread(verify, path, manifest, max_threads=self._max_threads)
        return path
