"""Names of algorithms and peers as options: what wins over what, and what is refused."""

from __future__ import annotations

import typing

import pytest
from pydantic import ValidationError

from asyncrl.config.advantage_presets import ALGORITHMS, PEERS, Peer
from tests.algorithms.advantage_tables import table


@pytest.mark.parametrize("peer", typing.get_args(Peer))
@pytest.mark.parametrize("name", [*ALGORITHMS, "outcome", "gae", "gdpo", "otb", "pass_at_k"])
def test_every_name_goes_with_every_peer(name, peer):
    config = table(name, peer)
    assert table(**config.model_dump()) == config  # the resolved table means the same again


def test_peers_are_known_to_the_type():
    assert set(PEERS) == set(typing.get_args(Peer))


def test_what_is_written_wins_over_the_algorithm_and_the_algorithm_over_the_peer():
    # Mutations: the order of any two of the three.
    assert table("grpo", "prime_rl").scale == "none"
    assert table("grpo", "prime_rl", scale="std").scale == "std"
    assert table("maxrl", "prime_rl").scale == "mean"
    assert table("rloo", "nemo").scale == "none"
    assert table("grpo", "nemo").baseline == "leave_one_out"
    assert table("dr_grpo", "nemo", baseline="mean").baseline == "mean"
    assert table("rloo", "skyrl").group_of_one == "zero"
    assert table("grpo", "skyrl").group_of_one == "reward"
    assert table("reinforce_plus_plus", "openrlhf").whiten.deviation == "population"
    assert table("reinforce_plus_plus", "openrlhf", whiten=None).whiten is None


@pytest.mark.parametrize(
    "wrong", [{"type": "grp"}, {"type": "grpo", "preset": "verll"}, {"type": "gae", "baseline": "mean"}]
)
def test_unknown_names_and_keys_are_refused(wrong):
    with pytest.raises(ValidationError):
        table(**wrong)
