"""The coordinator's half of a checkpoint: its state as `coordinator.json`, then COMMIT, once the ranks have written.

    ranks          version v is out -> their shards on disk -> StepReport of batch v - 1
    coordinator    metrics of v written -> coordinator.json -> COMMIT -> renamed -> old ones removed

Both ends know from the configuration which versions are due, so no message of its own is needed. The state is that
of version v although later batches may be formed already: an ordinal is consumed when it is in a batch before v,
or was left out of training. All others are leased anew by the run that goes on from here, lowest ordinal first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from pathlib import Path

import msgspec

from asyncrl.checkpoint_folder import commit, is_due, partial_folder, remove_old, write_durably
from asyncrl.config import CheckpointConfig
from asyncrl.coordinator.ledger import Consumed, Ledger
from asyncrl.coordinator.status import RunStatus
from asyncrl.errors import LearnerError
from asyncrl.run_directory import RunDirectory
from asyncrl.types import Span

STATE_FILE = "coordinator.json"


class CoordinatorState(msgspec.Struct, frozen=True):
    """What the coordinator knows at a version, besides what the configuration says."""

    version: int
    num_prompts: list[int]
    """Of each source of data.train: with others, the same ordinals would be other prompts."""
    frontier: int
    """Every ordinal below it is consumed."""
    beyond: list[int]
    """The consumed ordinals above it."""
    num_untrainable_in_a_row: int
    num_filtered_in_a_row: int
    ledger_counts: dict[str, int]
    status_counts: dict[str, int]
    file_bytes: dict[str, int]
    """Sizes of the run directory's files that grow: what is behind came after this version."""

    def restore(self, ledger: Ledger, status: RunStatus) -> None:
        """Puts a new ledger and status where those that were written had been."""
        ledger.resume_at(self.version, Consumed(self.frontier, set(self.beyond)))
        ledger.num_untrainable_in_a_row = self.num_untrainable_in_a_row
        ledger.num_filtered_in_a_row = self.num_filtered_in_a_row
        ledger.counts.update(self.ledger_counts)
        status.counts.update(self.status_counts)


def read_state(folder: Path) -> CoordinatorState:
    """Of a complete checkpoint. Raises LearnerError when it cannot be read."""
    file = folder / STATE_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=CoordinatorState)
    except (OSError, msgspec.MsgspecError) as error:
        raise LearnerError(
            f"{file} cannot be read ({error}); remove {folder} to resume from the checkpoint before it"
        ) from error


class CheckpointWriter:
    """Completes the checkpoints of a run."""

    def __init__(
        self,
        config: CheckpointConfig,
        num_prompts: list[int],
        ledger: Ledger,
        status: RunStatus,
        directory: RunDirectory,
    ) -> None:
        self._config = config
        self._num_prompts = num_prompts
        self._ledger = ledger
        self._status = status
        self._directory = directory

    async def reported(self, version: int, untrained: Collection[int]) -> None:
        """After the report of `version`: completes its checkpoint, if it is due.

        `untrained`: the ordinals in later batches. Raises LearnerError where the ranks have written to another place.
        """
        if not is_due(version, self._config.every):
            return
        start_s = time.monotonic()
        state, partial = self.state(version, untrained), partial_folder(self._directory.path, version)
        # Other tasks run meanwhile: flushing to a disk may take long.
        await asyncio.to_thread(self._write, partial, msgspec.json.encode(state))
        span = Span("commit_checkpoint", start_s, time.monotonic(), {"version": version})
        self._directory.append_spans("coordinator", [span])

    def state(self, version: int, untrained: Collection[int]) -> CoordinatorState:
        """`untrained`: the ordinals that are in batches from `version` on."""
        consumed = self._ledger.consumed.without(untrained)
        return CoordinatorState(
            version=version,
            num_prompts=self._num_prompts,
            frontier=consumed.frontier,
            beyond=sorted(consumed.beyond),
            num_untrainable_in_a_row=self._ledger.num_untrainable_in_a_row,
            num_filtered_in_a_row=self._ledger.num_filtered_in_a_row,
            ledger_counts=dict(self._ledger.counts),
            status_counts=dict(self._status.counts),
            file_bytes=self._directory.flush(),
        )

    def _write(self, partial: Path, state: bytes) -> None:
        try:
            write_durably(partial / STATE_FILE, state)
            commit(partial)
        except OSError as error:
            raise LearnerError(
                f"the checkpoint in {partial} cannot be completed ({error}); the learner's ranks and the coordinator "
                "must share the run directory, and it needs room"
            ) from error
        remove_old(self._directory.path, self._config.keep)
