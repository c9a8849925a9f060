"""The rules a received message must keep. codec.decode applies them; a refusal names field, value, sender.

Speed matters here (the coordinator checks every token of the run): a group costs one or two numpy reductions
an array, and only a refused one is searched for the position to name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from asyncrl.errors import WireError
from asyncrl.stream.messages import (
    Batch,
    Bye,
    EvalFinished,
    EvalLease,
    Failed,
    GroupFields,
    GroupFinished,
    Header,
    Heartbeat,
    Lease,
    RankHello,
    ServerHello,
    StepReport,
    TrajectoryFields,
    VersionAnnounced,
    VersionCommitted,
    VersionPublished,
    VersionRefused,
)
from asyncrl.types import (
    MAX_ABS_REWARD,
    MAX_DETAIL_CHARACTERS,
    Float32,
    Int32,
    Plan,
    SamplingSpec,
    Status,
    UInt8,
)

WIRE_VERSION = 4
"""Raised with every change of the messages or of their arrays; a test holds their digest to it."""

Refuse = Callable[[str, object, str], WireError]
"""(field, value, rule) -> the error that names them and the sender."""

_BEFORE_WELCOME = (ServerHello, RankHello, Heartbeat, Failed, Bye)
_HEARTBEAT_STATES = ("generating", "paused", "applying", "rewarding", "idle")
_MINIMUMS: dict[type, dict[str, int]] = {
    ServerHello: {"max_groups_in_flight": 1, "max_unacknowledged_bytes": 1},
    Heartbeat: {"num_steps": 0},
    Lease: {"ordinal": 0, "redraw": 0},
    EvalLease: {"version": 0, "row_index": 0},
    EvalFinished: {"version": 0},
    VersionCommitted: {"version": 0},
    VersionRefused: {"version": 0},
    RankHello: {"rank": 0, "num_ranks": 1},
    VersionAnnounced: {"version": 0},
    VersionPublished: {"version": 0},
    StepReport: {"index": 0},
}


@dataclass(slots=True)
class Limits:
    """What a receiver knows, and holds messages to. The coordinator raises newest_version."""

    vocab_size: int
    group_size: int
    max_prompt_tokens: int
    max_completion_tokens: int
    newest_version: int = 0
    """Newest announced version, for GroupFinished and VersionCommitted or -Refused (a Batch has its plan's index)."""
    run: str = ""
    """Empty: not known yet. A connection fills it in from the first message that it receives."""
    incarnation: str = ""
    """As `run`."""
    eval_num_samples: int = 1
    """Trajectories of a prompt that is evaluated."""
    eval_max_completion_tokens: int = 1


class _GroupSizes(NamedTuple):
    """How large a group may be, and the keys that say so."""

    num_trajectories: int
    num_trajectories_key: str
    max_tokens: int
    max_tokens_key: str


def _training_sizes(limits: Limits) -> _GroupSizes:
    return _GroupSizes(
        limits.group_size, "rollout.group_size", limits.max_completion_tokens, "rollout.max_completion_tokens"
    )


def _eval_sizes(limits: Limits) -> _GroupSizes:
    return _GroupSizes(
        limits.eval_num_samples,
        "eval.num_samples",
        limits.eval_max_completion_tokens,
        "eval.max_completion_tokens",
    )


def refuser(sender: str) -> Refuse:
    """Makes the errors about one sender's message."""

    def refuse(field: str, value: object, rule: str) -> WireError:
        shown = repr(value)
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        return WireError(f"{field} is {shown}: {rule} (from {sender[:120]!r})")

    return refuse


def check_header(header: Header, limits: Limits, peer: str, refuse: Refuse) -> None:
    """Wire version, sender, run, incarnation, sequence. Raises WireError."""
    if header.wire != WIRE_VERSION:
        raise wrong_wire_version(header.wire, refuse)
    if peer and header.sender != peer:
        raise refuse("sender", header.sender, f"the socket's identity is {peer!r}")
    may_be_unknown = isinstance(header.body, _BEFORE_WELCOME)
    for name in ("run", "incarnation"):
        value, own = getattr(header, name), getattr(limits, name)
        if not value and may_be_unknown:
            continue
        if not value:
            raise refuse(name, value, f"only the first messages to a coordinator may leave {name} empty")
        if own and value != own:
            raise refuse(name, value, f"this process belongs to {name} {own!r}")
    if header.sequence < 0:
        raise refuse("sequence", header.sequence, "a sequence counts from 0")


def wrong_wire_version(value: object, refuse: Refuse) -> WireError:
    return refuse("wire", value, f"this process speaks {WIRE_VERSION}; run the same asyncrl on both ends")


def check_body(header: Header, limits: Limits, refuse: Refuse) -> None:
    """Everything of the body that needs no array. Raises WireError."""
    body = header.body
    for name, minimum in _MINIMUMS.get(type(body), {}).items():
        if getattr(body, name) < minimum:
            raise refuse(f"body.{name}", getattr(body, name), f"it is at least {minimum}")
    match body:
        case GroupFinished():
            _check_group_fields(body.group, "body.group", _training_sizes(limits), refuse)
        case EvalFinished():
            if body.version > limits.newest_version:
                raise refuse("body.version", body.version, _from_the_future(limits.newest_version))
            _check_group_fields(body.group, "body.group", _eval_sizes(limits), refuse)
        case Heartbeat() if body.state not in _HEARTBEAT_STATES:
            raise refuse("body.state", body.state, f"it is one of {', '.join(_HEARTBEAT_STATES)}")
        case VersionCommitted() | VersionRefused() if body.version > limits.newest_version:
            raise refuse("body.version", body.version, _from_the_future(limits.newest_version))
        case RankHello() if body.rank >= body.num_ranks:
            raise refuse("body.rank", body.rank, f"there are {body.num_ranks} ranks")
        case Lease():
            _check_lease(body, _training_sizes(limits), refuse)
            if not 0 <= body.num_greedy < len(body.seeds):
                raise refuse(
                    "body.num_greedy", body.num_greedy, f"0 to {len(body.seeds) - 1} of the requests"
                )
        case EvalLease():
            _check_lease(body, _eval_sizes(limits), refuse)
            _check_sampling(body.sampling, _eval_sizes(limits), refuse)
        case Batch():
            _check_batch(body, limits, refuse)


def check_arrays(
    group: GroupFields,
    name: str,
    arrays: tuple[Int32, Int32, UInt8, Float32, Int32],
    limits: Limits,
    newest_version: int,
    refuse: Refuse,
) -> None:
    """Values of prompt_ids [P] and of token_ids, loss_mask, rollout_logprobs, policy_versions [sum T].

    A log-prob is finite and at most 0 (-0.0 and 0.0 are fine): nothing above 0 is forgiven as rounding, since
    engines compute it by log_softmax, which cannot exceed 0. A version is 0..newest_version; -1 (no weights
    sampled it) only where loss_mask is 0.
    """
    prompt_ids, token_ids, loss_mask, rollout_logprobs, policy_versions = arrays
    check_ids(prompt_ids, f"{name}.prompt_ids", limits, refuse)
    if not len(token_ids):
        return

    def refuse_first(bad: np.ndarray, array_name: str, array: np.ndarray, rule: str) -> WireError:
        return _refuse_first(bad, group.trajectories, f"{name}.trajectories", array_name, array, rule, refuse)

    # Seen as unsigned, a negative id or version is above every limit: one reduction checks both ends.
    if np.maximum.reduce(token_ids.view("<u4")) >= limits.vocab_size:
        bad = token_ids.view("<u4") >= limits.vocab_size
        raise refuse_first(bad, "token_ids", token_ids, _vocabulary(limits))
    if np.maximum.reduce(loss_mask) > 1:
        raise refuse_first(loss_mask > 1, "loss_mask", loss_mask, "a mask is 0 or 1")
    # NaN wins both reductions and fails both comparisons.
    if not (np.maximum.reduce(rollout_logprobs) <= 0 and np.minimum.reduce(rollout_logprobs) > -math.inf):
        bad = ~((rollout_logprobs <= 0) & (rollout_logprobs > -math.inf))
        raise refuse_first(bad, "rollout_logprobs", rollout_logprobs, "a log-prob is finite and at most 0")
    if np.maximum.reduce(policy_versions.view("<u4")) > newest_version:
        early = (policy_versions < -1) | ((policy_versions == -1) & (loss_mask != 0))
        if early.any():
            rule = "a version is at least 0, or -1 where loss_mask is 0"
            raise refuse_first(early, "policy_versions", policy_versions, rule)
        late = policy_versions > newest_version
        if late.any():
            raise refuse_first(late, "policy_versions", policy_versions, _from_the_future(newest_version))


def check_ids(prompt_ids: Int32, name: str, limits: Limits, refuse: Refuse) -> None:
    """A prompt [P]: 1 <= P <= max_prompt_tokens, every id in the vocabulary. Raises WireError."""
    if not 1 <= len(prompt_ids) <= limits.max_prompt_tokens:
        rule = f"a prompt has 1 to {limits.max_prompt_tokens} tokens (data.max_prompt_tokens)"
        raise refuse(f"{name} length", len(prompt_ids), rule)
    if np.maximum.reduce(prompt_ids.view("<u4")) >= limits.vocab_size:
        index = int(np.argmax(prompt_ids.view("<u4") >= limits.vocab_size))
        raise refuse(f"{name}[{index}]", int(prompt_ids[index]), _vocabulary(limits))


def _check_group_fields(group: GroupFields, name: str, sizes: _GroupSizes, refuse: Refuse) -> None:
    if group.ordinal < 0 or group.redraw < 0:
        raise refuse(f"{name}.(ordinal, redraw)", (group.ordinal, group.redraw), "both are at least 0")
    if len(group.trajectories) != sizes.num_trajectories:
        rule = f"a group has {sizes.num_trajectories} trajectories ({sizes.num_trajectories_key})"
        raise refuse(f"{name}.trajectories length", len(group.trajectories), rule)
    for index, fields in enumerate(group.trajectories):
        # The good case is decided in one expression: this runs for every trajectory of the run.
        scored = fields.status is Status.SCORED
        if (
            scored <= fields.num_tokens <= sizes.max_tokens
            and scored is (fields.reward is not None)
            and (fields.reward is None or -MAX_ABS_REWARD <= fields.reward <= MAX_ABS_REWARD)
            and len(fields.detail) <= (0 if scored else MAX_DETAIL_CHARACTERS)
            and (not fields.reward_components or scored)
            and all(-MAX_ABS_REWARD <= value <= MAX_ABS_REWARD for value in fields.reward_components.values())
        ):
            continue
        raise _bad_trajectory(fields, f"{name}.trajectories[{index}]", sizes, refuse)


def _bad_trajectory(fields: TrajectoryFields, name: str, sizes: _GroupSizes, refuse: Refuse) -> WireError:
    scored = fields.status is Status.SCORED
    if not scored <= fields.num_tokens <= sizes.max_tokens:
        rule = f"a {fields.status} trajectory has {int(scored)} to {sizes.max_tokens} tokens"
        return refuse(f"{name}.num_tokens", fields.num_tokens, f"{rule} ({sizes.max_tokens_key})")
    if scored is (fields.reward is None):
        rule = f"a trajectory has a reward exactly when its status is scored, and this one is {fields.status}"
        return refuse(f"{name}.reward", fields.reward, rule)
    if fields.reward is not None and not abs(fields.reward) <= MAX_ABS_REWARD:
        rule = f"a reward is finite and at most {MAX_ABS_REWARD:g} in size"
        return refuse(f"{name}.reward", fields.reward, rule)
    for label, value in fields.reward_components.items():
        if not abs(value) <= MAX_ABS_REWARD:
            rule = f"a component is finite and at most {MAX_ABS_REWARD:g} in size"
            return refuse(f"{name}.reward_components.{label[:40]}", value, rule)
    if fields.reward_components and not scored:
        rule = f"a trajectory has components exactly when it has a reward, and this one is {fields.status}"
        return refuse(f"{name}.reward_components", fields.reward_components, rule)
    if scored:
        return refuse(f"{name}.detail", fields.detail, "a scored trajectory has nothing to explain")
    rule = f"a detail has at most {MAX_DETAIL_CHARACTERS} characters"
    return refuse(f"{name}.detail length", len(fields.detail), rule)


def _check_lease(lease: Lease | EvalLease, sizes: _GroupSizes, refuse: Refuse) -> None:
    if len(lease.seeds) != sizes.num_trajectories:
        rule = f"{sizes.num_trajectories_key} is {sizes.num_trajectories}"
        raise refuse("body.seeds length", len(lease.seeds), rule)
    for index, seed in enumerate(lease.seeds):
        if not 0 <= seed < 1 << 63:
            raise refuse(f"body.seeds[{index}]", seed, "a seed has 63 bits")
    _check_json(lease.row, "body.row", refuse)


def _check_sampling(sampling: SamplingSpec, sizes: _GroupSizes, refuse: Refuse) -> None:
    if not 0 <= sampling.temperature < math.inf:
        raise refuse("body.sampling.temperature", sampling.temperature, "it is finite and at least 0")
    if not 0 < sampling.top_p <= 1:
        raise refuse("body.sampling.top_p", sampling.top_p, "it is above 0 and at most 1")
    if sampling.top_k < 0:
        raise refuse("body.sampling.top_k", sampling.top_k, "it is at least 0")
    if not 1 <= sampling.max_completion_tokens <= sizes.max_tokens:
        rule = f"it is 1 to {sizes.max_tokens} ({sizes.max_tokens_key})"
        raise refuse("body.sampling.max_completion_tokens", sampling.max_completion_tokens, rule)


def _check_batch(batch: Batch, limits: Limits, refuse: Refuse) -> None:
    """The groups are those that the plan, which must be whole, gives to this rank."""
    plan = batch.plan
    _check_plan(plan, refuse)
    if not 0 <= batch.rank < plan.num_ranks:
        raise refuse("body.rank", batch.rank, f"the plan has {plan.num_ranks} ranks")
    planned = [plan.ordinals[position] for position in plan.positions_of(batch.rank)]
    if (ordinals := [group.ordinal for group in batch.groups]) != planned:
        raise refuse("body.groups", ordinals, f"the plan gives rank {batch.rank} the ordinals {planned}")
    for index, group in enumerate(batch.groups):
        _check_group_fields(group, f"body.groups[{index}]", _training_sizes(limits), refuse)


def _check_plan(plan: Plan, refuse: Refuse) -> None:
    """Ranks with unequal numbers of microbatches would wait for each other in a collective."""
    if plan.index < 0:
        raise refuse("body.plan.index", plan.index, "batches count from 0")
    if plan.num_epochs < 1:
        raise refuse("body.plan.num_epochs", plan.num_epochs, "it is at least 1")
    if not plan.minibatches:
        raise refuse("body.plan.minibatches", [], "a batch has at least 1")
    for index, minibatch in enumerate(plan.minibatches):
        num_microbatches = [len(of_rank) for of_rank in minibatch]
        if len(minibatch) != plan.num_ranks or len(set(num_microbatches)) != 1 or not num_microbatches[0]:
            rule = f"each of the {plan.num_ranks} ranks has as many microbatches, at least 1"
            raise refuse(f"body.plan.minibatches[{index}] lengths", num_microbatches, rule)
    positions = sorted(position for rank in range(plan.num_ranks) for position in plan.positions_of(rank))
    if positions != list(range(len(plan.ordinals))):
        rule = f"each of the plan's {len(plan.ordinals)} groups is in one microbatch"
        raise refuse("body.plan.minibatches", positions, rule)


def _check_json(value: Any, name: str, refuse: Refuse) -> None:
    """msgpack can say more than JSON (bytes, times, extension types, keys of any type): none of it passes."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise refuse(f"{name} key", key, "a row is JSON: keys are strings")
            _check_json(item, f"{name}.{key[:40]}", refuse)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_json(item, f"{name}[{index}]", refuse)
    elif not (value is None or isinstance(value, str | int | float)):
        raise refuse(name, value, "a row is JSON: strings, numbers, booleans, null, lists, objects")


def _refuse_first(
    bad: np.ndarray,
    trajectories: Sequence[TrajectoryFields],
    name: str,
    array_name: str,
    array: np.ndarray,
    rule: str,
    refuse: Refuse,
) -> WireError:
    """Names the first bad element of an array that holds all trajectories end to end."""
    position = flat = int(np.argmax(bad))
    for index, fields in enumerate(trajectories):
        if position < fields.num_tokens:
            return refuse(f"{name}[{index}].{array_name}[{position}]", array[flat].item(), rule)
        position -= fields.num_tokens
    raise AssertionError("the array's length is the sum of num_tokens")


def _vocabulary(limits: Limits) -> str:
    return f"token ids are 0 to {limits.vocab_size - 1}"


def _from_the_future(newest_version: int) -> str:
    return f"from the future: the newest announced version is {newest_version}"
