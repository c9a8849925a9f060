"""Spreading work evenly: over ranks, and into microbatches under a token budget. Pure functions of numbers.

Longest first, each to the lightest part (Graham 1969), and the largest differencing method (Karmarkar and Karp 1982)
are both tried and then refined by exchanges between parts; the better one wins. The result depends on the costs and
their order alone, so every process computes the same plan.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from itertools import count
from math import ceil

Parts = list[list[int]]
"""[part] -> positions of its items, ascending."""


def group_cost(prompt_tokens: int, completion_tokens: Sequence[int], *, linear: float) -> float:
    """The work of a packed group, whose completions each attend to the prompt and to themselves.

    linear x tokens + the sum of squared lengths as attention sees them: P^2 + sum of C (2 P + C). `linear` weighs the
    matrices against attention and is about 6 x the hidden size for a transformer (24576 in verl, for 4096).
    """
    tokens = prompt_tokens + sum(completion_tokens)
    return linear * tokens + prompt_tokens**2 + sum(c * (2 * prompt_tokens + c) for c in completion_tokens)


def balance(costs: Sequence[float], num_parts: int, *, equal_count: bool = False) -> Parts:
    """Partition of the items 0..n-1 whose heaviest part is light, and among such, whose lightest is heavy.

    costs [n], not negative. With `equal_count` the parts' item counts differ by one at most. With fewer items than
    parts some parts are empty.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}, but there must be a part")
    found = [
        refined(parts, costs, equal_count=equal_count)
        for parts in (
            longest_first(costs, num_parts, equal_count=equal_count),
            largest_differencing(costs, num_parts, equal_count=equal_count),
        )
    ]
    best = min(found, key=lambda parts: _badness(part_costs(parts, costs)))
    return [sorted(part) for part in best]


def pack(costs: Sequence[float], capacity: float, *, min_parts: int = 1) -> Parts:
    """The fewest parts that `balance` fits into `capacity`, at least `min_parts`; none is empty without need.

    An item over the capacity is a part of its own, and its part the only one that may exceed the capacity.
    """
    giants = [[item] for item, cost in enumerate(costs) if cost > capacity]
    rest = [item for item, cost in enumerate(costs) if cost <= capacity]
    rest_costs = [costs[item] for item in rest]
    fewest = max(ceil(sum(rest_costs) / capacity), 1 if rest else 0, min_parts - len(giants))
    if fewest <= 0:
        return giants
    for num_parts in count(fewest):
        parts = balance(rest_costs, num_parts)
        if max(part_costs(parts, rest_costs)) <= capacity:
            return giants + [[rest[item] for item in part] for part in parts]
    raise AssertionError("every item fits a part of its own")


def part_costs(parts: Parts, costs: Sequence[float]) -> list[float]:
    return [sum(costs[item] for item in part) for part in parts]


def longest_first(costs: Sequence[float], num_parts: int, *, equal_count: bool) -> Parts:
    """Each item, longest first, to the lightest part that has room; ties to the first."""
    parts: Parts = [[] for _ in range(num_parts)]
    smallest, num_larger = divmod(len(costs), num_parts)
    heap = [(0.0, part) for part in range(num_parts)]
    for item in _longest_first(costs):
        load, part = heapq.heappop(heap)
        parts[part].append(item)
        is_full = False
        if equal_count:
            num_larger -= len(parts[part]) == smallest + 1
            is_full = len(parts[part]) >= smallest + (num_larger > 0)
        if not is_full:
            heapq.heappush(heap, (load + costs[item], part))
        if equal_count and num_larger == 0:  # no part may grow beyond `smallest` from now on
            heap = [(load, part) for load, part in heap if len(parts[part]) < smallest]
            heapq.heapify(heap)
    return parts


def largest_differencing(costs: Sequence[float], num_parts: int, *, equal_count: bool) -> Parts:
    """Combines the two partial partitions with the largest spreads, heaviest part to lightest, until one is left.

    For equal counts it starts with partitions of one item a part, of items next to each other by cost; the items
    that are left over fill the first of them, which thus has empty parts.
    """
    order = _longest_first(costs)[::-1]
    starts: list[list[int]] = [[item] for item in order]
    if equal_count:
        left_over = len(order) % num_parts
        starts = [order[:left_over]] if left_over else []
        starts += [order[i : i + num_parts] for i in range(left_over, len(order), num_parts)]
    number = count()

    def entry(partition: list[tuple[float, list[int]]]) -> tuple[float, int, list[tuple[float, list[int]]]]:
        """Spread first, so that a heap gives the largest; `number` breaks ties by age."""
        partition.sort(key=lambda part: part[0])
        return partition[0][0] - partition[-1][0], next(number), partition

    heap = [
        entry([(costs[item], [item]) for item in items] + [(0.0, [])] * (num_parts - len(items)))
        for items in starts or [[]]
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        combined = [
            (heavy + light, [*items, *others])
            for (heavy, items), (light, others) in zip(one, reversed(other), strict=True)
        ]
        heapq.heappush(heap, entry(combined))
    return [items for _, items in heap[0][2]]


def refined(parts: Parts, costs: Sequence[float], *, equal_count: bool) -> Parts:
    """Exchanges items of the heaviest part, then of the lightest, while that brings two parts closer together.

    An exchange is an item for an item, or without `equal_count` an item for nothing. Each one lowers the sum of the
    squared loads, so this ends.
    """
    parts = [sorted(part, key=lambda item: costs[item]) for part in parts]
    loads = part_costs(parts, costs)
    while True:
        heaviest, lightest = loads.index(max(loads)), loads.index(min(loads))
        pairs = [(heaviest, other) for other in range(len(parts))]
        exchange = _best_exchange(parts, loads, pairs, costs, equal_count=equal_count)
        if exchange is None:
            pairs = [(other, lightest) for other in range(len(parts))]
            exchange = _best_exchange(parts, loads, pairs, costs, equal_count=equal_count)
        if exchange is None:
            return parts
        source, target, given, taken = exchange
        _move(parts, loads, costs, given, source, target)
        if taken is not None:
            _move(parts, loads, costs, taken, target, source)


def _best_exchange(
    parts: Parts,
    loads: list[float],
    pairs: list[tuple[int, int]],
    costs: Sequence[float],
    *,
    equal_count: bool,
) -> tuple[int, int, int, int | None] | None:
    """(heavier part, lighter part, item given, item taken or None) with the lowest larger load, if any lowers it."""
    best, best_gain = None, 0.0
    for source, target in pairs:
        gap = loads[source] - loads[target]
        if gap <= 2 * best_gain:  # an exchange gains gap / 2 at most
            continue
        available: list[int | None] = [None] if not equal_count else []
        available += parts[target]
        target_costs = [0.0 if item is None else costs[item] for item in available]
        for given in parts[source]:
            place = bisect_left(target_costs, costs[given] - gap / 2)
            for index in (place - 1, place):
                if 0 <= index < len(available):
                    shift = costs[given] - target_costs[index]
                    gain = min(shift, gap - shift)
                    if gain > best_gain + 1e-12 * abs(loads[source]):
                        best, best_gain = (source, target, given, available[index]), gain
    return best


def _move(
    parts: Parts, loads: list[float], costs: Sequence[float], item: int, source: int, target: int
) -> None:
    parts[source].remove(item)
    parts[target].insert(bisect_left([costs[other] for other in parts[target]], costs[item]), item)
    for part in (source, target):
        loads[part] = sum(costs[other] for other in parts[part])


def _longest_first(costs: Sequence[float]) -> list[int]:
    """Items by falling cost, ties by position."""
    return sorted(range(len(costs)), key=lambda item: (-costs[item], item))


def _badness(loads: list[float]) -> tuple[float, float]:
    return max(loads), -min(loads)
