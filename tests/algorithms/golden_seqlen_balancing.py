"""Balancing over ranks and packing into microbatches: a partition at least as good as each peer's.

A partition is as good when its heaviest part is not heavier and, if equally heavy, its lightest not lighter; a packing
when it has fewer parts, or as many and is as good. verl's microbatches are `balance` of its number of them, and may
exceed the budget there.
"""

from __future__ import annotations

from math import ceil

from asyncrl.coordinator.balance import balance, pack, part_costs
from tests.algorithms.goldens import Golden


def replay(case: Golden) -> None:
    lengths, params, outputs = case.inputs["lengths"], case.params, case.outputs
    function = case.function.rpartition("::")[2]
    if function == "first_fit_pack":
        assert len(pack(lengths, params["max_tokens_per_bin"])) <= outputs["bins"]
        return
    if function in ("ffd_allocate", "kk_allocate"):
        parts = pack(lengths, params["capacity"], min_parts=params["min_groups"])
        assert max(part_costs(parts, lengths)) <= params["capacity"]
        assert params["min_groups"] <= len(parts) <= outputs["groups"]
        if len(parts) == outputs["groups"]:
            _check_as_good(part_costs(parts, lengths), outputs["max_sum"], outputs["min_sum"])
    elif function == "rearrange_micro_batches":
        num_parts = ceil(sum(lengths) / params["max_token_len"])
        assert num_parts == outputs["num_micro_batches"]
        _check_as_good(
            part_costs(balance(lengths, num_parts), lengths), outputs["max_sum"], outputs["min_sum"]
        )
    elif function == "_balance_by_squared_length":
        costs = [length**2 for length in lengths]
        parts = balance(costs, params["k_partitions"])
        found = part_costs(parts, costs)
        _check_as_good(found, outputs["max_sum_of_squares"], outputs["min_sum_of_squares"])
    else:
        equal_count = params.get("equal_size", function == "balanced_greedy_partition")
        parts = balance(lengths, params["k_partitions"], equal_count=equal_count)
        if equal_count:
            assert sorted(map(len, parts)) == sorted(outputs["sizes"])
        _check_as_good(part_costs(parts, lengths), outputs["max_sum"], outputs["min_sum"])


def _check_as_good(found: list[float], heaviest: float, lightest: float) -> None:
    assert (max(found), -min(found)) <= (heaviest, -lightest), f"{found} against {lightest} to {heaviest}"
