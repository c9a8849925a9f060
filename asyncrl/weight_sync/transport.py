"""The staged Transport seam: how a finished snapshot gets to a file on a rollout server's node.

The learner `offer`s each finished version; what the offer says travels as a message; every server `stage`s
the newest one, which ends in a local file whose every digest was compared. One file a transport implements
it; the engine that then maps the file knows nothing of it.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from asyncrl.weight_sync.manifest import Manifest


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a server needs to stage one version."""

    transport: str
    """Name of the transport: `shm`."""
    path: str
    """The learner's file, on the learner's node."""
    manifest: Manifest


class Transport(Protocol):
    """One way for a snapshot to reach a server's node."""

    def offer(self, path: str, manifest: Manifest) -> Offer:
        """Learner side: publishes the finished snapshot at `path`."""
        ...

    async def stage(self, offer: Offer) -> str:
        """Server side: a verified local file of the version. Returns its path.

        Raises SnapshotGone when the version was replaced by a newer one, and WeightSyncError, naming the
        tensor, when its bytes are not those of the manifest.
        """
        ...
