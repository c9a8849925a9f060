"""`--resume`: which checkpoint a run goes on from, whether it may, and what is moved aside before it does.

look       find_resumption: reads only, before anything starts      (ConfigError)
go back    rewind: the run directory as it was at the checkpoint; what came later lies in `aside/`
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncrl.checkpoint_folder import Checkpoint, find_checkpoints
from asyncrl.config import Config, changed_keys, load_config, run_identity
from asyncrl.coordinator.checkpoint import CoordinatorState, read_state
from asyncrl.envs.dataset import Dataset
from asyncrl.errors import ConfigError, LearnerError
from asyncrl.run_directory import EVALUATIONS, GROWING, RunDirectory, run_path

MAY_DIFFER = ("run.name", "run.dir")
"""They name the run directory that was found."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """A checkpoint that this configuration can go on from."""

    checkpoint: Checkpoint
    state: CoordinatorState
    notes: list[str]
    """What a person should know: keys that changed, folders that are no checkpoints."""


def find_resumption(config: Config) -> Resumption:
    """Of the run directory that the configuration names. Raises ConfigError where the run cannot go on."""
    if config.run.name is None:
        raise ConfigError("--resume: no run is named; add run.name=NAME, a folder of run.dir")
    run = run_path(config)
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"--resume: {run} is no run directory; start the run without --resume")
    complete, incomplete = find_checkpoints(run)
    ignored = [
        f"{folder} has no COMMIT: it was not written to its end, and is ignored" for folder in incomplete
    ]
    if not complete:
        raise ConfigError(
            f"--resume: {run} has no complete checkpoint (checkpoint.every was "
            f"{load_config(run / 'config.yaml').checkpoint.every}); start anew under another run.name"
            + "".join(f"; {note}" for note in ignored)
        )
    newest = complete[0]
    if newest.version >= config.learner.max_versions:
        raise ConfigError(
            f"learner.max_versions: {config.learner.max_versions}, and {newest.folder} has version {newest.version} "
            "already; raise it to go on"
        )
    changed = _check_config(load_config(run / "config.yaml"), config)
    try:
        state = read_state(newest.folder)
    except LearnerError as error:
        raise ConfigError(f"--resume: {error}") from error
    return Resumption(newest, state, [*ignored, *changed])


def _check_config(before: Config, after: Config) -> list[str]:
    """What changed, in words. Raises ConfigError for keys that make it another run."""
    old, new = run_identity(before), run_identity(after)
    refused = [
        f"{key}: {new[key]!r}, and the run was started with {old[key]!r}, which its checkpoint holds for; change it "
        "back, or start a run of another name"
        for key in new
        if new[key] != old.get(key)
    ]
    if refused:
        raise ConfigError("\n".join(refused))
    return [
        f"{key} is {now!r} from here on, and was {was!r}"
        for key, (was, now) in changed_keys(before, after).items()
        if key not in MAY_DIFFER
    ]


def check_data(resumption: Resumption, dataset: Dataset) -> None:
    """Raises ConfigError when the rows are not as many as they were: the order would be another one."""
    if dataset.sizes != resumption.state.num_prompts:
        raise ConfigError(
            f"data.train: {dataset.sizes} prompts (of each source), and {resumption.checkpoint.folder} was written "
            f"with {resumption.state.num_prompts}: the order of the prompts would be another one; bring the same rows"
        )


def open_run_directory(config: Config, resumption: Resumption | None) -> RunDirectory:
    """A new one, or for a run that goes on its own, as it was at the checkpoint."""
    if resumption is None:
        return RunDirectory.create(config)
    directory = RunDirectory.reopen(config)
    rewind(directory.path, resumption)
    directory.go_on(config, resumption.checkpoint.version)
    return directory


def rewind(run: Path, resumption: Resumption) -> None:
    """Takes the run directory back to the checkpoint's version, and notes where what came after it is.

    Every version and every evaluation is in its file once when the run goes on. Logs stay as they are.
    """
    version, aside = resumption.checkpoint.version, _new_folder(run, resumption.checkpoint.version)
    for name in GROWING:
        _cut(run / name, resumption.state.file_bytes.get(name, 0), aside / name)
    _keep_evaluations(run / EVALUATIONS, version, aside / EVALUATIONS)
    kept = evaluated_versions(run)
    for folder in ("trajectories", "evaluations"):
        for file in (run / folder).glob("version_*.jsonl"):
            of = int(file.stem.removeprefix("version_"))
            if of > version or (folder == "evaluations" and of == version and of not in kept):
                _move(file, aside / folder / file.name)
    for name in ("model", "adapter"):
        if (run / name).exists():
            _move(run / name, aside / name)
    shutil.copy2(run / "config.yaml", aside)
    resumption.notes.append(f"the files of later versions, and the configuration before, are in {aside}")


def evaluated_versions(run: Path) -> set[int]:
    """Those with a line in evaluations.jsonl."""
    file = run / EVALUATIONS
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return {json.loads(line)["version"] for line in lines}


def _keep_evaluations(file: Path, version: int, aside: Path) -> None:
    """Those up to `version`, but for one of that version that was cut: the run going on makes it again."""
    if not file.is_file():
        return
    lines = list(_whole_lines(file))
    records = [json.loads(line) for line in lines]
    kept = [r["version"] < version or (r["version"] == version and not r.get("cut", "")) for r in records]
    if not all(kept):
        file.rename(aside)
        file.write_bytes(b"".join(line for line, keep in zip(lines, kept, strict=True) if keep))


def _whole_lines(file: Path) -> Iterator[bytes]:
    """Without one that was being written when the run was killed."""
    with file.open("rb") as lines:
        yield from (line for line in lines if line.endswith(b"\n"))


def _cut(file: Path, num_bytes: int, aside: Path) -> None:
    """Leaves the first `num_bytes` of a file; the rest becomes `aside`."""
    if not file.is_file() or file.stat().st_size <= num_bytes:
        return
    if num_bytes == 0:
        _move(file, aside)
        return
    aside.parent.mkdir(parents=True, exist_ok=True)
    with file.open("rb+") as source:
        source.seek(num_bytes)
        with aside.open("wb") as rest:
            shutil.copyfileobj(source, rest)
        source.truncate(num_bytes)


def _move(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source.rename(target)


def _new_folder(run: Path, version: int) -> Path:
    """`aside/after_version_000012`, or with -2, -3, ... where the run was resumed there before."""
    number, name = 1, f"after_version_{version:06d}"
    while True:
        folder = run / "aside" / (name if number == 1 else f"{name}-{number}")
        if not folder.exists():
            folder.mkdir(parents=True)
            return folder
        number += 1
