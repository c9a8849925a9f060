"""Log files: what this process and its children print while an engine runs, and how a log's end is shown."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NUM_LINES_SHOWN = 20


def shown_end(log: Path) -> str:
    """The log's path and its last lines, for above an error."""
    lines = log.read_text(errors="replace").splitlines()[-NUM_LINES_SHOWN:]
    return "\n".join([f"{log} ends with:", *(f"  | {line}" for line in lines)])


@contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Inside, stdout and stderr of this process, and of those that it starts, are appended to `log`."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, original in enumerate(kept, start=1):
            os.dup2(original, descriptor)
            os.close(original)
