"""The rollout server: one process, one engine. It runs the leases it is granted and applies new versions.

    consumes                  does                                                 produces
    Lease                     a task a group: generate, score                      GroupFinished
    EvalLease                 the same, sampled as the lease says                  EvalFinished
    WeightsOffer              stages the newest, pauses, applies, resumes          VersionCommitted
    Acknowledged              forgets the group                                    -
    Stop                      leaves (an error in it becomes this process's)       Bye
    a clock                   says what it works on                                Heartbeat

It ends when told to, when the coordinator is gone (PeerLost), or when its engine fails (Failed, EngineError).
"""

from __future__ import annotations

import asyncio
import time
import traceback
from contextlib import suppress

from asyncrl.config import Config, shared_digest
from asyncrl.envs.env import Env, Rewards
from asyncrl.errors import EngineUnfit, PeerLost, SnapshotGone, WeightSyncError, first_cause, one_line
from asyncrl.rollout_server.engine import Engine
from asyncrl.rollout_server.group_runner import run_group
from asyncrl.stream.codec import Received, group_fields
from asyncrl.stream.connections import Connection
from asyncrl.stream.messages import (
    Acknowledged,
    Bye,
    EvalFinished,
    EvalLease,
    Failed,
    GroupFinished,
    Heartbeat,
    Lease,
    ServerHello,
    ServerWelcome,
    Stop,
    VersionCommitted,
    VersionRefused,
    WeightsOffer,
)
from asyncrl.stream.outbox import Outbox
from asyncrl.types import SamplingSpec, Span
from asyncrl.weight_sync.manifest import Manifest, decode_manifest
from asyncrl.weight_sync.transport import Transport

MAX_VERSIONS_REFUSED = 3
"""A server that could not take so many versions in a row ends."""


RETRY_S = 2.0
"""Between two tries of a version; and how long the next offer may lag behind a snapshot it replaced."""


class Stopped(Exception):
    """The coordinator said Stop, with its error or none; a control-flow signal inside this file."""


class RolloutServer:
    """Serves one coordinator with one started engine, until it is told to stop."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        connection: Connection,
        *,
        env: Env,
        rewards: Rewards,
        transport: Transport,
    ) -> None:
        self._config = config
        self._engine = engine
        self._connection = connection
        self._env = env
        self._rewards = rewards
        self._transport = transport
        self._sampling = sampling_spec(config)
        self._outbox = Outbox(config.stream.max_message_bytes)
        self._leases: set[int] = set()
        self._eval_leases: set[tuple[int, int]] = set()
        self._offer: WeightsOffer | None = None
        self._offered = asyncio.Event()
        self._applying = False

    async def run(self) -> None:
        """Returns after a normal Stop. Raises the first cause of failure, having told the coordinator."""
        try:
            await self._say_hello()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send_heartbeats())
                tasks.create_task(self._apply_versions())
                # A task like the others, so that the group's first exception is the first in time.
                await tasks.create_task(self._take_messages(tasks))
        except asyncio.CancelledError:
            await self._leave(Bye())
            raise
        except (Stopped, BaseExceptionGroup) as error:
            cause = first_cause(error)
            if not isinstance(cause, Stopped):
                await self._leave(Failed(one_line(cause), "".join(traceback.format_exception(cause))))
                raise cause from None
            await self._leave(Bye())
            if str(cause):
                raise PeerLost(f"the coordinator ended this server: {cause}") from None

    async def _say_hello(self) -> None:
        max_groups = max_groups_in_flight(self._config, self._engine)
        await self._connection.send(
            ServerHello(
                config_digest=shared_digest(self._config),
                max_groups_in_flight=max_groups,
                max_unacknowledged_bytes=self._outbox.max_bytes,
            )
        )
        connect_s = self._config.timeouts.connect_s
        try:
            async with asyncio.timeout(connect_s):
                received = await self._connection.recv()
        except TimeoutError:
            raise PeerLost(
                f"the coordinator did not welcome this server within timeouts.connect_s = {connect_s:g} s"
            ) from None
        match received.body:
            case ServerWelcome():
                return
            case Stop(error):
                raise Stopped(error)
            case body:
                raise PeerLost(f"the coordinator answered Hello with {type(body).__name__}, not a welcome")

    async def _take_messages(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            received = await self._connection.recv()
            match received.body:
                case Lease():
                    self._leases.add(received.body.ordinal)
                    tasks.create_task(self._run_lease(received))
                case EvalLease() as lease:
                    self._eval_leases.add((lease.version, lease.row_index))
                    tasks.create_task(self._run_eval_lease(received, lease))
                case Acknowledged(groups):
                    self._outbox.acknowledge(groups)
                case WeightsOffer() as offer:
                    self._offer = offer
                    self._offered.set()
                case Stop(error):
                    raise Stopped(error)
                case body:
                    raise PeerLost(f"the coordinator sent {type(body).__name__} to a rollout server")

    async def _run_lease(self, received: Received) -> None:
        lease = received.body
        assert isinstance(lease, Lease)
        assert received.prompt_ids is not None
        try:
            await self._outbox.wait_for_room(self._config.timeouts.lease_s)
        except TimeoutError as error:
            raise PeerLost(f"the coordinator acknowledges nothing (timeouts.lease_s): {error}") from None
        group = await run_group(
            lease,
            received.prompt_ids,
            env=self._env,
            engine=self._engine,
            rewards=self._rewards,
            sampling=self._sampling,
        )
        self._outbox.add(group)
        await self._connection.send(GroupFinished(group_fields(group)), groups=[group])
        self._leases.discard(lease.ordinal)

    async def _run_eval_lease(self, received: Received, lease: EvalLease) -> None:
        assert received.prompt_ids is not None
        group = await run_group(
            Lease(lease.row_index, 0, lease.seeds, lease.row),
            received.prompt_ids,
            env=self._env,
            engine=self._engine,
            rewards=self._rewards,
            sampling=lease.sampling,
            name=f"eval.{lease.version}.{lease.row_index}",
        )
        await self._connection.send(EvalFinished(lease.version, group_fields(group)), groups=[group])
        self._eval_leases.discard((lease.version, lease.row_index))

    async def _apply_versions(self) -> None:
        """Applies the newest offered version; those that were replaced meanwhile are skipped.

        A version that cannot be taken is reported, the old one goes on serving, and the newest is tried again
        after a moment: without a server that takes it, no newer one may ever come.
        """
        num_refused = 0
        while True:
            await self._offered.wait()
            self._offered.clear()
            offer = self._offer
            assert offer is not None
            manifest = decode_manifest(offer.manifest)
            if self._has(manifest):
                continue
            try:
                spans = await self._apply(offer.path, manifest)
            except EngineUnfit:
                raise
            except WeightSyncError as error:
                if isinstance(error, SnapshotGone) and await self._newer_than(offer):
                    continue
                num_refused += 1
                if num_refused >= MAX_VERSIONS_REFUSED:
                    raise
                await self._connection.send(VersionRefused(offer.version, one_line(error)))
                await self._newer_than(offer)
                self._offered.set()
                continue
            num_refused = 0
            await self._connection.send(VersionCommitted(offer.version, spans))

    async def _newer_than(self, offer: WeightsOffer) -> bool:
        """Waits a moment for the offer that replaces this one. Returns whether it came."""
        with suppress(TimeoutError):
            async with asyncio.timeout(RETRY_S):
                await self._offered.wait()
        return self._offer is not offer

    def _has(self, manifest: Manifest) -> bool:
        """Whether the engine serves this version, or a newer one of the same incarnation."""
        version = self._engine.version
        same = self._engine.incarnation == manifest.incarnation
        return same and version is not None and manifest.version <= version

    async def _apply(self, path: str, manifest: Manifest) -> list[Span]:
        """gate closed -> pause(keep) -> load, label, read back -> gate open: nothing is sampled in between."""
        version = {"version": manifest.version}
        verify_s = time.monotonic()
        staged = await self._transport.stage(path, manifest)
        pause_s = time.monotonic()
        self._applying = True
        try:
            async with asyncio.timeout(self._config.timeouts.sync_s):
                await self._engine.pause()
                apply_s = time.monotonic()
                try:
                    await self._engine.apply(staged, manifest)
                except EngineUnfit:
                    raise
                except WeightSyncError:
                    if self._engine.version is not None:
                        await self._engine.resume()  # nothing was changed: the old version goes on
                    raise
                applied_s = time.monotonic()
                await self._engine.resume()
        except TimeoutError:
            raise PeerLost(
                f"version {manifest.version} was not applied within timeouts.sync_s = "
                f"{self._config.timeouts.sync_s:g} s"
            ) from None
        finally:
            self._applying = False
        return [
            Span("verify", verify_s, pause_s, version),
            Span("pause", pause_s, time.monotonic(), version),
            Span("apply", apply_s, applied_s, version),
        ]

    async def _send_heartbeats(self) -> None:
        while True:
            statistics = self._engine.statistics()
            num_steps = statistics.num_steps + self._rewards.num_finished
            await self._connection.send(
                Heartbeat(sorted(self._leases), num_steps, self._state(), sorted(self._eval_leases))
            )
            await asyncio.sleep(self._config.timeouts.heartbeat_s / 3)

    def _state(self) -> str:
        if self._applying:
            return "applying"
        if not self._leases and not self._eval_leases:
            return "idle"
        statistics = self._engine.statistics()
        return "generating" if statistics.num_running or statistics.num_waiting else "rewarding"

    async def _leave(self, last_word: Bye | Failed) -> None:
        """Tells the coordinator that this server ends, if it is still there to hear it."""
        with suppress(PeerLost):
            await self._connection.send(last_word)


def sampling_spec(config: Config) -> SamplingSpec:
    """What every training request is sampled with, and what the learner scores with."""
    rollout = config.rollout
    return SamplingSpec(rollout.temperature, rollout.max_completion_tokens, rollout.stop)


def max_groups_in_flight(config: Config, engine: Engine) -> int:
    """Credits of one server: as configured, or as many whole groups as the engine runs at once."""
    if config.rollout.max_groups_in_flight != "auto":
        return config.rollout.max_groups_in_flight
    return max(1, engine.max_concurrent_requests // config.rollouts_per_group)
