"""Where checkpoints are, and when one is whole. Torch-free: the learner's ranks and the coordinator both write.

runs/<name>/checkpoints/version_000012.partial/   while it is written
                       /version_000012/           complete: renamed once COMMIT, the last file, is on disk
                           learner-<rank>.safetensors, learner-<rank>.json    learner/checkpoint.py
                           coordinator.json                                   coordinator/checkpoint.py
                           COMMIT

A folder without COMMIT is never read.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

COMMIT = "COMMIT"
_NAME = re.compile(r"version_(\d{6,})(\.partial)?")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete one."""

    version: int
    folder: Path


def is_due(version: int, every: int) -> bool:
    """Whether `version` is written; `every` is checkpoint.every. The ranks and the coordinator both ask."""
    return every > 0 and version % every == 0


def partial_folder(run: Path, version: int) -> Path:
    """Where a checkpoint of the run directory `run` is written."""
    return run / "checkpoints" / f"version_{version:06d}.partial"


def begin(folder: Path) -> None:
    """Makes a partial folder, without what an interrupted run has left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def commit(partial: Path) -> Path:
    """Makes a partial folder, whose files are on disk, a complete checkpoint, and returns where it is.

    Its COMMIT is on disk before the folder has its name.
    """
    complete = partial.with_suffix("")
    write_durably(partial / COMMIT, f"{complete.name}\n".encode())
    _flush(partial)
    shutil.rmtree(complete, ignore_errors=True)  # without COMMIT, else this version was not trained again
    partial.rename(complete)
    _flush(partial.parent)
    return complete


def find_checkpoints(run: Path) -> tuple[list[Checkpoint], list[Path]]:
    """(complete checkpoints of a run directory, the newest first; folders without COMMIT)."""
    complete: list[Checkpoint] = []
    incomplete: list[Path] = []
    for folder in sorted((run / "checkpoints").glob("version_*")):
        if (named := _NAME.fullmatch(folder.name)) is None:
            continue
        if named[2] is None and (folder / COMMIT).is_file():
            complete.append(Checkpoint(int(named[1]), folder))
        else:
            incomplete.append(folder)
    return sorted(complete, key=lambda one: -one.version), incomplete


def remove_old(run: Path, keep: int) -> None:
    """Removes what is older than the newest `keep` complete checkpoints, incomplete folders among it."""
    complete, incomplete = find_checkpoints(run)
    for old in complete[keep:]:
        (old.folder / COMMIT).unlink()  # first: an interrupted removal leaves nothing that looks complete
        shutil.rmtree(old.folder)
    for folder in incomplete:
        if (
            complete
            and int(folder.name.removeprefix("version_").removesuffix(".partial")) < complete[0].version
        ):
            shutil.rmtree(folder)


def write_durably(path: Path, content: bytes) -> None:
    """Returns once the file is on disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def flush_file(path: Path) -> None:
    """Returns once a file that others have written is on disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
