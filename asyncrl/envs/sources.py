"""Where rows come from: one SourceConfig becomes a RowTable, whose rows are read when they are asked for.

JSONL stays in its file (only the lines' positions and checksums are kept); parquet, saved folders and data sets
of the Hub are the `datasets` library's memory-mapped Arrow files; what a generator yields is kept in memory.
Called by dataset.py. Torch-free.
"""

from __future__ import annotations

import glob
import json
import os
import weakref
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from asyncrl.config import SourceConfig
from asyncrl.envs.tasks import TASKS
from asyncrl.errors import ConfigError, DataError, one_line
from asyncrl.hub import is_hub_name
from asyncrl.user_code import did_you_mean, import_function, names_user_code

if TYPE_CHECKING:
    import datasets

BATCH_ROWS = 1000
"""Rows that the conversion of a parquet file holds at once."""
KINDS = (
    "use JSONL or parquet files, a folder saved by `datasets`, owner/name of the Hub, module:attr, or a task: "
    + ", ".join(TASKS)
)


class RowTable(Protocol):
    """Rows by position, from 0. Reading one may raise DataError."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> object: ...
    def where(self, index: int, /) -> str:
        """Names the row for an error: its file and line, or its source and number."""
        ...


def open_source(source: SourceConfig, seed: int, max_rows: int, key: str) -> RowTable:
    """The rows that `source` names. `key` is the config key for errors; a generator is given `seed`.

    Raises ConfigError for a name that stands for nothing, DataError for a file that cannot be read.
    """
    name = os.path.expanduser(source.path)
    if task := TASKS.get(name):
        return generate(task, seed, _whole(source, key), max_rows)
    if os.path.isdir(name):
        return _folder(source, name, key)
    if files := _files(name):
        _whole(source, key)
        return Joined([_file(file, key) for file in files])
    if names_user_code(name):
        return generate(import_function(name, key), seed, _whole(source, key), max_rows)
    if is_hub_name(name, with_owner=True):
        return _named(source, key)
    raise ConfigError(
        f"{key}: {name!r} is neither a file nor a folder nor a task{did_you_mean(name, TASKS)}; {KINDS}"
    )


def generate(generator: Callable[[int], Iterable[object]], seed: int, name: str, max_rows: int) -> Listed:
    """The first `max_rows` that it gives; what it raises becomes a DataError."""
    taken: list[object] = []
    try:
        taken.extend(islice(generator(seed), max_rows + 1))
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(f"{name}: the generator failed at row {len(taken)} with {one_line(error)}") from error
    return Listed(taken[:max_rows], name, is_cut=len(taken) > max_rows)


class Listed:
    """Rows in memory."""

    def __init__(self, rows: Sequence[object], name: str, is_cut: bool = False) -> None:
        self._rows = rows
        self._name = name
        self.is_cut = is_cut
        """Whether there were more."""

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> object:
        return self._rows[index]

    def where(self, index: int) -> str:
        return f"{self._name}, row {index} (from 0)"


class JsonLines:
    """A JSONL file: the positions of its lines in memory, each line parsed when it is read.

    A line that is no longer what it was raises DataError: its prompt is tokens already, and another row's answer
    would be compared with what they bring.
    """

    def __init__(self, path: str, key: str) -> None:
        self._path = path
        self._starts, self._lengths, self._numbers = array("q"), array("q"), array("q")
        self._checksums = array("I")
        position = 0
        try:
            with open(path, "rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        self._starts.append(position)
                        self._lengths.append(len(line))
                        self._numbers.append(number)
                        self._checksums.append(zlib.crc32(line))
                    position += len(line)
                # The file that was looked at stays the one that is read, also when its name is given to another.
                self._file = os.dup(file.fileno())
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); check {key}") from error
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> object:
        line = os.pread(self._file, self._lengths[index], self._starts[index])
        if zlib.crc32(line) != self._checksums[index]:
            raise DataError(
                f"{self.where(index)}: changed since the file was looked at; write new data to a new file, and "
                "start again"
            )
        try:
            return json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where(index)}: not UTF-8 ({error})") from error
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{self.where(index)}: not JSON ({error}); every line must be one JSON object"
            ) from error

    def where(self, index: int) -> str:
        return f"{self._path}, line {self._numbers[index]}"


class ArrowRows:
    """A data set of the `datasets` library: memory-mapped."""

    def __init__(self, dataset: datasets.Dataset, name: str) -> None:
        self._dataset = dataset.with_format(None)
        self._name = name

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> object:
        try:
            return self._dataset[index]
        except Exception as error:  # a column that is decoded by a library: images, sound
            raise DataError(f"{self.where(index)}: cannot be read: {one_line(error)}") from error

    def where(self, index: int) -> str:
        return f"{self._name}, row {index} (from 0)"


class Joined:
    """Several tables, one after the other."""

    def __init__(self, tables: Sequence[RowTable]) -> None:
        self._tables = tables
        self._starts = [0, *accumulate(len(table) for table in tables)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> object:
        table, position = self._find(index)
        return table[position]

    def where(self, index: int) -> str:
        table, position = self._find(index)
        return table.where(position)

    def _find(self, index: int) -> tuple[RowTable, int]:
        number = bisect_right(self._starts, index) - 1
        return self._tables[number], index - self._starts[number]


def _files(name: str) -> list[str]:
    """The files that `name`, a file or a pattern, stands for; none when it looks like neither."""
    if os.path.isfile(name):
        return [name]
    if any(character in name for character in "*?["):
        if not (files := sorted(file for file in glob.glob(name, recursive=True) if os.path.isfile(file))):
            raise DataError(f"{name}: the pattern matches no file")
        return files
    # What is there and no file would be read for ever: a pipe without a writer.
    named_like_one = Path(name).suffix in (".json", ".jsonl", ".parquet") and not os.path.exists(name)
    return [name] if named_like_one else []


def _whole(source: SourceConfig, key: str) -> str:
    """The name of a source that has neither subsets nor splits. Raises ConfigError when it is asked for one."""
    for what, given, default in (("subset", source.subset, None), ("split", source.split, "train")):
        if given != default:
            raise ConfigError(
                f"{key}: {what} {given!r} of {source.path!r} means nothing: only a data set of the Hub or a folder "
                "has such parts; leave it out, and name the file that you mean"
            )
    return source.path


def _file(path: str, key: str) -> RowTable:
    if Path(path).suffix != ".parquet":
        return JsonLines(path, key)
    import pyarrow.parquet

    library = _library()
    try:
        with open(path, "rb") as file:
            if not pyarrow.parquet.read_metadata(file).num_rows:
                return Listed([], path)  # which the library calls a split that does not exist
        # Converted once, in batches, to an Arrow file in the library's cache.
        dataset = library.Dataset.from_parquet(path, batch_size=BATCH_ROWS)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or one_line(error)}); check {key}"
        ) from error
    except Exception as error:
        raise DataError(f"{path}: not a parquet file that can be read: {_cause(error)}") from error
    return ArrowRows(dataset, path)


def _folder(source: SourceConfig, folder: str, key: str) -> RowTable:
    """A folder of `save_to_disk`, or one that the library can load by its path, such as a clone from the Hub."""
    library = _library()
    saved = any(os.path.isfile(os.path.join(folder, file)) for file in ("state.json", "dataset_dict.json"))
    try:
        if saved:
            loaded = library.load_from_disk(folder)
        else:
            loaded = library.load_dataset(folder, source.subset, split=source.split)
    except Exception as error:
        raise DataError(
            f"{key}: the folder {source.path!r} cannot be read as a data set (subset {source.subset}, split "
            f"{source.split}): {_cause(error)}; check it, or name its files"
        ) from error
    if not saved:
        return ArrowRows(loaded, f"{source.path} {source.split}")
    if isinstance(loaded, library.Dataset):
        return ArrowRows(loaded, _whole(source, key))
    if source.split not in loaded:
        raise ConfigError(
            f"{key}: {source.path!r} has no split {source.split!r}; it has {', '.join(map(str, loaded))}"
        )
    return ArrowRows(loaded[source.split], f"{source.path} {source.split}")


def _named(source: SourceConfig, key: str) -> RowTable:
    """A data set of the Hub or its cache, by name. Raises ConfigError."""
    library = _library()
    try:
        loaded = library.load_dataset(source.path, source.subset, split=source.split)
    except Exception as error:  # the library's own, the Hub client's, httpx's and OSErrors
        raise ConfigError(
            f"{key}: {source.path!r} cannot be loaded as a data set of the Hub (subset {source.subset}, split "
            f"{source.split}): {_cause(error)}; check name, subset, split and network (offline, the Hub's cache "
            "must hold it), or name a file that exists"
        ) from error
    assert isinstance(loaded, library.Dataset)
    return ArrowRows(loaded, f"{source.path} {source.split}")


def _library() -> Any:
    """The `datasets` library: half a second to import, so only when a source needs it."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs it raises too
    return datasets


def _cause(error: BaseException) -> str:
    """The library wraps what went wrong in errors that do not say it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(error)
