"""The endless data order and the seeds: pure functions, so a restart or another server repeats them exactly."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def _hash63(*numbers: int) -> int:
    """63-bit hash of integers: nearby seeds share nothing (seed + index would collide between seeds)."""
    raw = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") >> 1


def request_seed(seed: int, ordinal: int, sample: int, redraw: int) -> int:
    """Seed of one request: 63 bits of (seed, ordinal, sample, redraw)."""
    return _hash63(seed, ordinal, sample, redraw)


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, num_rows: int) -> NDArray[np.int64]:
    """[num_rows] the rows of one epoch, shuffled: a pure function of (seed, epoch)."""
    return np.random.Generator(np.random.PCG64(_hash63(seed, epoch))).permutation(num_rows)


def place(seed: int, ordinal: int, num_rows: int) -> tuple[int, int]:
    """(epoch, row index) of an ordinal in the endless order."""
    epoch, position = divmod(ordinal, num_rows)
    return epoch, int(epoch_order(seed, epoch, num_rows)[position])
