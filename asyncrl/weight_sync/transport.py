"""The staged Transport seam: how a finished snapshot gets to a file on a rollout server's node.

The learner says with VersionPublished where its finished file lies and what is in it (the manifest); the
coordinator passes both on with WeightsOffer. Every server `stage`s the newest version, which ends in a local
file whose every digest was compared. One class a transport implements it; the engine that then maps the file
knows nothing of it.
"""

from __future__ import annotations

from typing import Protocol

from asyncrl.weight_sync.manifest import Manifest


class Transport(Protocol):
    """One way for a snapshot to reach a server's node."""

    async def stage(self, path: str, manifest: Manifest) -> str:
        """A verified local file of the version whose file is `path` on the learner's node. Returns its path.

        Raises SnapshotGone when the version was replaced by a newer one, and WeightSyncError, naming the
        tensor, when its bytes are not those of the manifest.
        """
        ...
