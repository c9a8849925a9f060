"""Snapshots: one immutable file a version, full tensors where the manifest says.

The learner's ranks write it (`SnapshotWriter`), a rollout server checks it (`verify`, without torch) and the
engine's worker maps it (`map_readonly`). Host peak: two snapshots, because version v is unlinked only when
v + 1 is finished. A process that has mapped a file keeps its bytes until it unmaps it.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from asyncrl.errors import SnapshotGone, WeightSyncError
from asyncrl.weight_sync.manifest import Manifest, TensorEntry

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_INCARNATION = re.compile(r"[A-Za-z0-9_]+")


def snapshot_path(directory: str, run_id: str, incarnation: str, version: int) -> str:
    """`<directory>/asyncrl-<run_id>-<incarnation>-v000012.weights`."""
    if not _INCARNATION.fullmatch(incarnation):
        raise WeightSyncError(f"incarnation {incarnation!r} must be letters, digits and _ only")
    return str(Path(directory) / f"asyncrl-{run_id}-{incarnation}-v{version:06d}.weights")


def bytes_free(directory: str) -> int:
    """Bytes that can still be written in `directory`. Raises WeightSyncError when it does not exist."""
    try:
        return shutil.disk_usage(directory).free
    except OSError as error:
        raise WeightSyncError(
            f"weight_sync.dir {directory!r} cannot be used: {error.strerror}; name an existing folder"
        ) from error


def remove_all(directory: str, run_id: str) -> int:
    """Unlinks every snapshot of the run, of any incarnation. Returns how many there were.

    Raises nothing: it runs where a run ends, and must not hide why. What cannot be removed is logged.
    """
    ours = re.compile(rf"asyncrl-{re.escape(run_id)}-{_INCARNATION.pattern}-v\d+\.weights")
    num_removed = 0
    try:
        for path in Path(directory).iterdir():
            if ours.fullmatch(path.name):
                path.unlink(missing_ok=True)
                num_removed += 1
    except OSError as error:
        logger.warning("snapshots of run %s may be left in %s: %s", run_id, directory, error)
    return num_removed


class SnapshotWriter:
    """Writes a run's snapshots, one version at a time; every learner rank has one.

    A version: rank 0 calls `create`, then (after a barrier) the others `open`; each rank calls `write_rows`
    for the rows it holds; after another barrier each calls `digest` for its share of the entries; rank 0
    calls `finish` with all the digests, the others `close`. `unlink` forgets an older version. Whatever ends
    a rank, it calls `close`: a version that is not finished then leaves no file.
    """

    def __init__(self, directory: str, run_id: str, *, max_threads: int = 1) -> None:
        """`max_threads`: threads that one digest may use."""
        self.directory = directory
        self.run_id = run_id
        self.max_threads = max_threads
        self._manifest: Manifest | None = None
        self._map: mmap.mmap | None = None
        self._unfinished_path: str | None = None
        """The file that `create` made and `finish` has not completed."""

    def path(self, manifest: Manifest) -> str:
        return snapshot_path(self.directory, self.run_id, manifest.incarnation, manifest.version)

    def create(self, manifest: Manifest) -> str:
        """Makes the file with all its bytes allocated and maps it. Returns its path.

        Raises WeightSyncError when it exists, or when the folder has no room (nothing is left behind).
        """
        self.close()
        path = self.path(manifest)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise WeightSyncError(f"snapshot {path} cannot be created: {error.strerror}") from error
        self._unfinished_path = path
        try:
            # Pages that are allocated now cannot run out later, where it would be a SIGBUS.
            os.posix_fallocate(descriptor, 0, max(manifest.total_bytes, 1))
        except OSError as error:
            self.close()
            raise WeightSyncError(
                f"snapshot of version {manifest.version} needs {manifest.total_bytes} bytes and "
                f"{self.directory} has {bytes_free(self.directory)} free ({error.strerror}); make room or "
                "move weight_sync.dir"
            ) from error
        finally:
            os.close(descriptor)
        self._map_file(path, manifest)
        return path

    def open(self, manifest: Manifest) -> None:
        """Maps the file that rank 0 created."""
        self.close()
        self._map_file(self.path(manifest), manifest)

    def _map_file(self, path: str, manifest: Manifest) -> None:
        with _open_checked(path, manifest, os.O_RDWR) as descriptor:
            self._map = mmap.mmap(descriptor, 0)
        self._manifest = manifest

    def write_rows(self, entry: TensorEntry, row_offset: int, rows: torch.Tensor) -> None:
        """Writes `rows` [R, ...] as rows row_offset .. row_offset + R of the entry (dim 0).

        A scalar entry is written with row_offset 0. Values are converted to the entry's dtype on their way
        into the file. Raises WeightSyncError when the rows do not fit the entry.
        """
        target = _view(self._mapped(), entry, writable=True)
        if not entry.shape:
            target, rows = target.reshape(1), rows.reshape(1)
        last = row_offset + (rows.shape[0] if rows.ndim else 0)
        if row_offset < 0 or rows.shape[1:] != target.shape[1:] or last > target.shape[0]:
            raise WeightSyncError(
                f"rows {row_offset} to {last} of shape {tuple(rows.shape)} do not fit {entry.name} of "
                f"shape {entry.shape}"
            )
        target[row_offset:last].copy_(rows.detach())

    def digest(self, entries: Iterable[TensorEntry]) -> dict[str, str]:
        """blake3 of each entry's bytes in the file, hex, by name."""
        with memoryview(self._mapped()) as view:
            return {entry.name: _digest(view, entry, self.max_threads) for entry in entries}

    def finish(self, digests: Mapping[str, str]) -> Manifest:
        """Closes the file. Returns its manifest with the digests, which makes the version complete."""
        manifest = self._manifest
        if manifest is None:
            raise WeightSyncError("no snapshot is open: create one before finish")
        names = [entry.name for entry in manifest.tensors]
        if missing := sorted(set(names) - set(digests)):
            raise WeightSyncError(
                f"version {manifest.version} has no digest of {missing[0]} ({len(missing)} miss)"
            )
        tensors = tuple(msgspec.structs.replace(e, digest=digests[e.name]) for e in manifest.tensors)
        self._unfinished_path = None
        self.close()
        return msgspec.structs.replace(manifest, tensors=tensors)

    def close(self) -> None:
        """Unmaps the open file, if any, and unlinks it if this writer created it and did not finish it.

        Idempotent. Finished files stay.
        """
        if self._unfinished_path is not None:
            Path(self._unfinished_path).unlink(missing_ok=True)
            self._unfinished_path = None
        self._manifest = None
        if self._map is not None:
            with suppress(BufferError):  # a write that was interrupted holds a view: the map ends with it
                self._map.close()
            self._map = None

    def unlink(self, incarnation: str, version: int) -> None:
        """Removes a version's file; servers that have mapped it keep its bytes. Idempotent."""
        Path(snapshot_path(self.directory, self.run_id, incarnation, version)).unlink(missing_ok=True)

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            raise WeightSyncError("no snapshot is open: create or open one first")
        return self._map


@contextmanager
def map_readonly(path: str, manifest: Manifest) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Maps the snapshot and yields an iterator of (name, tensor), views of the file in the manifest's order.

    Nothing is copied, and a write through a view is a fault. The map goes away with the context, or with the
    last view that somebody still holds. Raises SnapshotGone when there is no file, WeightSyncError when it
    has not the manifest's size.
    """
    with _open_checked(path, manifest, os.O_RDONLY) as descriptor:
        mapping = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    try:
        yield ((entry.name, _view(mapping, entry, writable=False)) for entry in manifest.tensors)
    finally:
        with suppress(BufferError):
            mapping.close()


def verify(path: str, manifest: Manifest, *, max_threads: int = 1) -> None:
    """Compares the digest of every tensor in the file with the manifest's. Blocking, and without torch.

    Raises SnapshotGone when there is no file, WeightSyncError when it has not the manifest's size or a
    tensor's bytes differ (the message names the first).
    """
    with _open_checked(path, manifest, os.O_RDONLY) as descriptor:
        mapping = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    with mapping, memoryview(mapping) as view:
        for entry in manifest.tensors:
            if (found := _digest(view, entry, max_threads)) != entry.digest:
                raise WeightSyncError(
                    f"version {manifest.version}: {entry.name} in {path} has the digest {found[:16]} "
                    f"and the manifest says {entry.digest[:16] or 'nothing'}; stage it again"
                )


@contextmanager
def _open_checked(path: str, manifest: Manifest, flags: int) -> Iterator[int]:
    """A descriptor of the file, of exactly the manifest's size."""
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise SnapshotGone(f"snapshot {path} of version {manifest.version} is not there") from error
    except OSError as error:
        raise WeightSyncError(f"snapshot {path} cannot be opened: {error.strerror}") from error
    try:
        if (size := os.fstat(descriptor).st_size) != max(manifest.total_bytes, 1):
            raise WeightSyncError(
                f"snapshot {path} has {size} bytes, the manifest of version {manifest.version} says "
                f"{manifest.total_bytes}"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def _digest(view: memoryview, entry: TensorEntry, max_threads: int) -> str:
    with view[entry.offset : entry.offset + entry.num_bytes] as tensor_bytes:
        return blake3(tensor_bytes, max_threads=max_threads).hexdigest()


def _view(mapping: mmap.mmap, entry: TensorEntry, *, writable: bool) -> torch.Tensor:
    """The entry's tensor [*shape] over the mapped bytes."""
    import torch

    dtype = getattr(torch, entry.dtype)
    if not entry.num_bytes:
        return torch.empty(entry.shape, dtype=dtype)
    # The tensor keeps this memoryview, which keeps the map open: torch itself holds only the object it is
    # given, not an export of its bytes, and would outlive a closed map.
    export = memoryview(mapping)[entry.offset : entry.offset + entry.num_bytes]
    with warnings.catch_warnings():
        if not writable:
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(export, dtype=dtype).reshape(entry.shape)
