"""Learner ranks as real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def finish_ranks(program: Path, num_ranks: int, *arguments: str, deadline_s: float) -> None:
    """Runs `program RANK NUM_RANKS *arguments` for every rank; none of them outlives this call.

    Fails with what the first rank that failed wrote to stderr.
    """
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), str(num_ranks), *arguments],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
        )
        for rank in range(num_ranks)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=deadline_s)
            assert rank.returncode == 0, errors.decode()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
