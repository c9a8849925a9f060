"""Every message of the stream, as typed structs: the header of a frame. docs/wire.md shows the bytes.

    rollout server -> coordinator    ServerHello, Heartbeat, GroupFinished, EvalFinished, VersionCommitted,
                                     VersionRefused, Failed, Bye
    coordinator -> rollout server    ServerWelcome, Lease, EvalLease, Acknowledged, WeightsOffer, Stop
    learner rank -> coordinator      RankHello, VersionAnnounced, VersionPublished, StepReport, Failed, Bye
    coordinator -> learner rank      RankWelcome, Batch, VersionRecorded, Stop

Lease, EvalLease, GroupFinished, EvalFinished and Batch carry arrays in the frames behind the header (codec.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.types import Plan, SamplingSpec, Span, Status


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of all messages; the class name is the kind on the wire."""


class ServerHello(Message, frozen=True, tag=True):
    """First word of a rollout server. `config_digest` covers what both ends must agree on."""

    config_digest: str
    max_groups_in_flight: int
    """Credits: groups the coordinator may lease to this server at once."""
    max_unacknowledged_bytes: int
    """Credits: bytes of finished groups this server holds before it takes no more leases."""


class ServerWelcome(Message, frozen=True, tag=True):
    """The coordinator takes the server in. Leases follow once it has committed a version."""


class Heartbeat(Message, frozen=True, tag=True):
    """Three times per `timeouts.heartbeat_s`, from servers; from the coordinator to ranks, without fields."""

    leases: list[int] = []
    """Ordinals that this server works on."""
    num_steps: int = 0
    """Engine steps and finished rewards so far: it advances while the server gets on with its leases."""
    state: str = "generating"
    """generating | paused | applying | rewarding | idle"""
    eval_leases: list[tuple[int, int]] = []
    """(version, row_index) of the evaluation prompts that this server works on."""


class Lease(Message, frozen=True, tag=True):
    """One group to generate. Arrays: prompt_ids [P] int32."""

    ordinal: int
    redraw: int
    seeds: list[int]
    """[G] one 63-bit seed a request."""
    row: dict[str, Any]
    """The data set row, for the reward."""
    num_greedy: int = 0
    """The last so many of the requests are greedy."""


class EvalLease(Message, frozen=True, tag=True):
    """One prompt of the evaluation of `version`, for a server that serves this version and is offered no newer one
    until it has answered. Arrays: prompt_ids [P] int32."""

    version: int
    row_index: int
    """Position in the evaluation's data set."""
    seeds: list[int]
    """[N] one 63-bit seed a request."""
    sampling: SamplingSpec
    row: dict[str, Any]
    """The data set row, for the reward."""


class TrajectoryFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trajectory has besides its arrays."""

    num_tokens: int
    reward: float | None
    status: Status
    finish_reason: str
    text: str
    detail: str = ""
    """Why there is no reward."""
    reward_components: dict[str, float] = {}
    """What each reward gave, by its label."""


class GroupFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a group has besides its arrays.

    Arrays, in this order: prompt_ids [P] int32, then over all trajectories end to end
    token_ids [sum T] int32, loss_mask [sum T] uint8, rollout_logprobs [sum T] float32,
    policy_versions [sum T] int32.
    """

    ordinal: int
    redraw: int
    trajectories: list[TrajectoryFields]
    spans: list[Span] = []


class GroupFinished(Message, frozen=True, tag=True):
    """A finished group. Kept by the sender until an Acknowledged names it."""

    group: GroupFields


class EvalFinished(Message, frozen=True, tag=True):
    """The answer to an EvalLease. Its sender keeps nothing: a server that is lost is asked no more."""

    version: int
    """The one that was asked for; the tokens' own versions say what sampled them."""
    group: GroupFields
    """Its ordinal is the lease's row_index, its redraw 0."""


class Acknowledged(Message, frozen=True, tag=True):
    """The coordinator holds these groups (or had them already): the sender may forget them."""

    groups: list[tuple[int, int]]
    """(ordinal, redraw)"""


class WeightsOffer(Message, frozen=True, tag=True):
    """The newest finished version. A server that is behind applies it at its own pace."""

    version: int
    path: str
    manifest: bytes
    """A `weight_sync.manifest.Manifest` as JSON."""


class VersionCommitted(Message, frozen=True, tag=True):
    """The server's engine serves this version from now on."""

    version: int
    spans: list[Span] = []
    """verify, pause, apply: how long each took."""


class VersionRefused(Message, tag=True, frozen=True):
    """The server could not take this version and goes on serving its old one."""

    version: int
    error: str


class RankHello(Message, frozen=True, tag=True):
    """First word of a learner rank."""

    config_digest: str
    rank: int
    num_ranks: int


class RankWelcome(Message, frozen=True, tag=True):
    """The coordinator takes the rank in."""


class VersionAnnounced(Message, frozen=True, tag=True):
    """Rank 0 is about to publish `version`: no server may have committed it before this is recorded."""

    version: int


class VersionRecorded(Message, frozen=True, tag=True):
    """The announcement is recorded; the snapshot may become visible."""

    version: int


class VersionPublished(Message, frozen=True, tag=True):
    """The snapshot of `version` is finished."""

    version: int
    path: str
    manifest: bytes
    spans: list[Span] = []


class Batch(Message, frozen=True, tag=True):
    """The plan of a batch and this rank's shard. Arrays: those of its groups, one after another."""

    plan: Plan
    rank: int
    """Of the plan: the ranks of a tensor group have the same."""
    groups: list[GroupFields]
    """In the order of `plan.positions_of(rank)`."""


class StepReport(Message, frozen=True, tag=True):
    """Rank 0, after the optimizer steps of batch `index`: metrics already reduced over ranks."""

    index: int
    metrics: dict[str, float]
    spans: list[Span] = []


class Failed(Message, frozen=True, tag=True):
    """The sender is about to exit because of this error."""

    error: str
    """One line: what, the value, what to do."""
    traceback: str


class Stop(Message, frozen=True, tag=True):
    """The run ends; the receiver says Bye and exits. `error` is empty at a normal end."""

    error: str = ""


class Bye(Message, frozen=True, tag=True):
    """The sender leaves on purpose."""


AnyMessage = (
    ServerHello
    | ServerWelcome
    | Heartbeat
    | Lease
    | GroupFinished
    | EvalLease
    | EvalFinished
    | Acknowledged
    | WeightsOffer
    | VersionCommitted
    | VersionRefused
    | RankHello
    | RankWelcome
    | VersionAnnounced
    | VersionRecorded
    | VersionPublished
    | Batch
    | StepReport
    | Failed
    | Stop
    | Bye
)


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first frame of every message."""

    wire: int
    """Wire version; both ends must have the same."""
    run: str
    """Run name and id: a peer of another run is refused."""
    incarnation: str
    """New at every learner start. Empty in a Hello, before the peer knows it."""
    sender: str
    sequence: int
    """Counts a sender's messages from 0: a gap is an alarm."""
    body: AnyMessage
    arrays: list[tuple[str, int]] = []
    """(dtype, length) of each frame behind this one."""
