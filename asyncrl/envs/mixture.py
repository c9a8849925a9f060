"""How several sources share the prompts of a run: pure functions over numbers. Called by dataset.py
and order.py.

Equal weights: the sources are shuffled together, so that each has the share of its size. Weights that differ:
each source has its weight's share, whatever its size, by taking turns in a fixed cycle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from asyncrl.errors import ConfigError

MAX_CYCLE = 100_000
"""Longest cycle of turns: it is kept in memory."""


def takes_turns(weights: Sequence[float]) -> bool:
    """Whether the weights, not the sizes, decide the shares."""
    return len(set(weights)) > 1


def shares(sizes: Sequence[int], weights: Sequence[float]) -> list[float]:
    """Each source's share of the prompts; they sum to 1."""
    parts = weights if takes_turns(weights) else sizes
    return [part / sum(parts) for part in parts]


def integer_weights(weights: Sequence[float]) -> list[int]:
    """The smallest integers in the proportion of `weights`, taken as the decimals they are written as.

    Raises ConfigError when they sum to more than MAX_CYCLE.
    """
    decimals = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(decimal.denominator for decimal in decimals))
    integers = [int(decimal * scale) for decimal in decimals]
    divisor = math.gcd(*integers)
    smallest = [integer // divisor for integer in integers]
    if sum(smallest) > MAX_CYCLE:
        raise ConfigError(
            f"weight: {', '.join(map(str, weights))} are in the proportion {':'.join(map(str, smallest))}, and "
            f"a cycle of turns may have {MAX_CYCLE}; use rounder numbers, such as "
            f"{', '.join(f'{max(0.001, weight / sum(weights)):.3f}' for weight in weights)}"
        )
    return smallest


def take_turns(weights: Sequence[int]) -> list[int]:
    """[sum(weights)] whose turn it is, source by its position; source k has weights[k] turns.

    Of the first n turns (of endlessly many cycles) source k has floor(n p) or ceil(n p), where p is its
    proportion: turn j of k may come from slot floor(j / p) on and must come before slot ceil((j + 1) / p), and
    of those that may come the one that must come first is taken (of several, the one that could first).
    Earliest deadline first meets every deadline of unit jobs on one machine that can be met at all, and the
    fluid schedule (rate p) meets these.
    """
    total = sum(weights)
    taken = [0] * len(weights)
    turns: list[int] = []
    for slot in range(total):
        windows = (
            (-(-(taken[k] + 1) * total // weight), taken[k] * total // weight, k)
            for k, weight in enumerate(weights)
        )
        _, _, source = min(window for window in windows if window[1] <= slot)
        taken[source] += 1
        turns.append(source)
    return turns
