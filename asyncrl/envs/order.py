"""The endless data order and the seeds: pure functions, so a restart or another server repeats them exactly."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from asyncrl.envs.mixture import integer_weights, take_turns, takes_turns


def _hash63(*numbers: int) -> int:
    """63-bit hash of integers: nearby seeds share nothing (seed + index would collide between seeds)."""
    raw = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") >> 1


def request_seed(seed: int, ordinal: int, sample: int, redraw: int) -> int:
    """Seed of one request: 63 bits of (seed, ordinal, sample, redraw)."""
    return _hash63(seed, ordinal, sample, redraw)


def eval_seed(seed: int, version: int, row_index: int, sample: int) -> int:
    """Seed of one request of an evaluation: 63 bits of (seed, version, row, sample), and of no training request."""
    return _hash63(seed, version, row_index, sample, 0)


def epoch_order(seed: int, epoch: int, num_prompts: int) -> NDArray[np.int64]:
    """[num_prompts] the prompts of one epoch, shuffled: a pure function of (seed, epoch)."""
    return np.random.Generator(np.random.PCG64(_hash63(seed, epoch))).permutation(num_prompts)


@dataclass(frozen=True, slots=True)
class _Stream:
    """Prompts that are shuffled together, endlessly: one epoch after the other."""

    seed: int
    first: int
    """Position of its first prompt in the data set."""
    num_prompts: int
    turns: NDArray[np.int64]
    """[W + 1] how many of the first n turns of a cycle are its."""


class DataOrder:
    """Which prompt an ordinal is. A pure function of (seed, sizes, weights); each look-up costs the same.

    With equal weights all prompts are one stream. With different ones each source is a stream of its own, and
    they take turns in a cycle of W turns (mixture.py), so that every source has its share in every prefix.
    """

    def __init__(self, seed: int, sizes: Sequence[int], weights: Sequence[float]) -> None:
        """`sizes`: prompts of each source, in the order of the data set. Raises ConfigError (integer_weights)."""
        if takes_turns(weights):
            cycle = np.array(take_turns(integer_weights(weights)))
            seeds = [_hash63(seed, source) for source in range(len(sizes))]
        else:
            cycle, sizes, seeds = np.zeros(1, np.int64), [sum(sizes)], [seed]
        firsts = np.cumsum([0, *sizes]).tolist()
        self._cycle = cycle
        self._streams = [
            _Stream(seeds[k], firsts[k], size, np.concatenate([[0], np.cumsum(cycle == k)]))
            for k, size in enumerate(sizes)
        ]
        # Two epochs a stream: trajectories are written of groups that were leased before the newest epoch began.
        self._epoch_order = lru_cache(maxsize=2 * len(sizes))(epoch_order)

    def place(self, ordinal: int) -> tuple[int, int]:
        """(epoch of the prompt's stream, position in the data set) of an ordinal."""
        num_cycles, turn = divmod(ordinal, len(self._cycle))
        stream = self._streams[self._cycle[turn]]
        drawn = num_cycles * int(stream.turns[-1]) + int(stream.turns[turn])
        epoch, position = divmod(drawn, stream.num_prompts)
        return epoch, stream.first + int(self._epoch_order(stream.seed, epoch, stream.num_prompts)[position])

    def epoch(self, ordinal: int) -> int:
        """Passes that ordinals 0..ordinal have begun, from 0, through the stream that is repeated most often."""
        num_cycles, turn = divmod(ordinal, len(self._cycle))
        drawn = [num_cycles * int(s.turns[-1]) + int(s.turns[turn + 1]) for s in self._streams]
        return max((n - 1) // s.num_prompts for n, s in zip(drawn, self._streams, strict=True) if n)
