"""The messages of evaluations: what goes in comes out, and what breaks a rule is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncrl.errors import WireError
from asyncrl.stream.codec import WIRE_VERSION, Limits, decode, encode, group_fields
from asyncrl.stream.messages import AnyMessage, EvalFinished, EvalLease, Header, Heartbeat
from asyncrl.types import SamplingSpec, Status, Trajectory, TrajectoryGroup

NEWEST, NUM_SAMPLES, MAX_TOKENS = 5, 3, 6
LIMITS = Limits(
    vocab_size=100,
    group_size=2,
    max_prompt_tokens=16,
    max_completion_tokens=4,
    newest_version=NEWEST,
    eval_num_samples=NUM_SAMPLES,
    eval_max_completion_tokens=MAX_TOKENS,
)
PROMPT = np.array([1, 2], np.int32)
LEASE = EvalLease(4, 7, [1, 2, 2**63 - 1], SamplingSpec(0.0, MAX_TOKENS, ("\n",), 0.9, 20), {"answer": "3"})


def header(body: AnyMessage) -> Header:
    return Header(WIRE_VERSION, "r", "i", "s", 0, body)


def lease_frames(**changes: Any) -> list[Any]:
    return encode(header(msgspec.structs.replace(LEASE, **changes)), (), PROMPT)


def group(lengths: list[int], version: int = 4) -> TrajectoryGroup:
    def one(n: int) -> Trajectory:
        return Trajectory(
            np.arange(n, dtype=np.int32),
            np.ones(n, np.uint8),
            np.full(n, -0.5, np.float32),
            np.full(n, version, np.int32),
            1.0,
            Status.SCORED,
            "stop",
            text="three",
        )

    return TrajectoryGroup(7, 0, PROMPT, [one(n) for n in lengths])


def finished_frames(sent: TrajectoryGroup, version: int = 4) -> list[Any]:
    return encode(header(EvalFinished(version, group_fields(sent))), [sent])


def test_an_eval_lease_comes_out_as_it_went_in():
    # Mutation: the prompt's frame only for Lease.
    received = decode(lease_frames(), LIMITS)
    assert received.body == LEASE
    assert received.prompt_ids is not None
    assert received.prompt_ids.tolist() == [1, 2]


def test_an_evaluated_group_comes_out_as_it_went_in_at_the_sizes_of_evaluations():
    # Mutation: held to rollout.group_size and rollout.max_completion_tokens, which are smaller here.
    received = decode(finished_frames(group([6, 1, 2])), LIMITS)
    assert received.body == EvalFinished(4, group_fields(group([6, 1, 2])))
    assert [t.token_ids.tolist() for t in received.groups[0].trajectories] == [
        [0, 1, 2, 3, 4, 5],
        [0],
        [0, 1],
    ]
    assert [t.policy_versions.tolist() for t in received.groups[0].trajectories] == [[4] * 6, [4], [4] * 2]


def test_a_heartbeat_lists_evaluation_leases_apart():
    body = Heartbeat([3], 9, "generating", [(4, 7), (4, 8)])
    assert decode(encode(header(body)), LIMITS).body == body


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seeds": [1, 2]}, "body.seeds length is 2: eval.num_samples is 3"),
        ({"seeds": [1, 2, -1]}, r"body.seeds\[2\] is -1: a seed has 63 bits"),
        ({"version": -1}, "body.version is -1: it is at least 0"),
        ({"row_index": -1}, "body.row_index is -1: it is at least 0"),
        ({"row": {"x": b"1"}}, "body.row.x is b'1': a row is JSON"),
        (
            {"sampling": SamplingSpec(-0.1, 6)},
            "body.sampling.temperature is -0.1: it is finite and at least 0",
        ),
        ({"sampling": SamplingSpec(float("nan"), 6)}, "body.sampling.temperature is nan"),
        ({"sampling": SamplingSpec(1.0, 7)}, r"is 7: it is 1 to 6 \(eval.max_completion_tokens\)"),
        (
            {"sampling": SamplingSpec(1.0, 6, (), 0.0)},
            "body.sampling.top_p is 0.0: it is above 0 and at most 1",
        ),
        ({"sampling": SamplingSpec(1.0, 6, (), 1.0, -1)}, "body.sampling.top_k is -1: it is at least 0"),
    ],
)
def test_an_eval_lease_that_breaks_a_rule_is_refused_by_name(changes: dict[str, Any], says: str):
    with pytest.raises(WireError, match=says):
        decode(lease_frames(**changes), LIMITS)


@pytest.mark.parametrize(
    ("sent", "version", "says"),
    [
        (group([1, 2]), 4, r"has 3 trajectories \(eval.num_samples\)"),
        (group([7, 1, 1]), 4, r"is 7: a scored trajectory has 1 to 6 tokens \(eval.max_completion_tokens\)"),
        (group([1, 1, 1], version=6), 4, "from the future: the newest announced version is 5"),
        (group([1, 1, 1]), 6, "body.version is 6: from the future: the newest announced version is 5"),
        (group([1, 1, 1]), -1, "body.version is -1: it is at least 0"),
    ],
)
def test_an_evaluated_group_that_breaks_a_rule_is_refused_by_name(
    sent: TrajectoryGroup, version: int, says: str
):
    with pytest.raises(WireError, match=says):
        decode(finished_frames(sent, version), LIMITS)


def test_a_positive_log_prob_of_an_evaluation_is_refused():
    # Mutation: the arrays of evaluations not looked at.
    bad = group([1, 1, 1])
    bad.trajectories[1] = replace(bad.trajectories[1], rollout_logprobs=np.array([0.5], np.float32))
    with pytest.raises(WireError, match=r"trajectories\[1\].rollout_logprobs\[0\] is 0.5"):
        decode(finished_frames(bad), LIMITS)
