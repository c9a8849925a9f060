"""The process of one learner rank: joins the process group, loads its shards, runs the loop."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from asyncrl.config import Config
from asyncrl.config_file import shared_digest
from asyncrl.errors import PeerLost
from asyncrl.launch.child import ChildSpec
from asyncrl.learner.loop import LearnerLoop
from asyncrl.learner.publish import SnapshotPublisher
from asyncrl.learner.update import PolicyLearner
from asyncrl.stream.codec import Limits
from asyncrl.stream.connections import BlockingConnection
from asyncrl.stream.envelope import Envelope
from asyncrl.stream.messages import Failed, RankHello, RankWelcome, Stop


def run_rank(config: Config, spec: ChildSpec) -> None:
    """Trains to the end and (rank 0) exports the model into the run directory. Raises the first cause."""
    envelope = Envelope(f"learner-{spec.rank}", max_message_bytes=config.stream.max_message_bytes)
    limits = learner_limits(config, Path(spec.model_path))
    with (
        process_group(config, spec) as device,
        BlockingConnection(
            spec.address,
            envelope,
            limits,
            heartbeat_s=config.timeouts.heartbeat_s,
            connect_s=config.timeouts.connect_s,
        ) as connection,
    ):
        try:
            _serve(config, spec, connection, envelope, device)
        except PeerLost:
            raise
        except Exception as error:
            connection.send(Failed(f"{type(error).__name__}: {error}", traceback.format_exc()))
            raise


def _serve(
    config: Config,
    spec: ChildSpec,
    connection: BlockingConnection,
    envelope: Envelope,
    device: torch.device,
) -> None:
    mesh = init_device_mesh(device.type, (config.learner.num_ranks,))
    learner = PolicyLearner(Path(spec.model_path), config, mesh=mesh)
    say_hello(config, spec.rank, connection)
    publisher = SnapshotPublisher(learner, config, device, run=envelope.run, incarnation=envelope.incarnation)
    try:
        loop = LearnerLoop(config, learner, connection, publisher)
        loop.run()
        if config.learner.export:
            learner.export(Path(spec.config_file).parent / "model")
        loop.say_goodbye()
    finally:
        publisher.close()


def say_hello(config: Config, rank: int, connection: BlockingConnection) -> None:
    """Introduces the rank; the welcome carries the run and the incarnation. Raises PeerLost."""
    connection.send(
        RankHello(shared_digest(config), rank, config.learner.num_ranks, socket.gethostname(), os.getpid())
    )
    try:
        body = connection.recv(config.timeouts.connect_s).body
    except TimeoutError:
        raise PeerLost(
            f"the coordinator did not welcome this rank within timeouts.connect_s = "
            f"{config.timeouts.connect_s:g} s"
        ) from None
    if isinstance(body, Stop):
        raise PeerLost(f"the coordinator refuses this rank: {body.error}")
    if not isinstance(body, RankWelcome):
        raise PeerLost(f"the coordinator answered Hello with {type(body).__name__}, not a welcome")


@contextmanager
def process_group(config: Config, spec: ChildSpec) -> Iterator[torch.device]:
    """torch.distributed over the learner ranks: NCCL on GPUs, gloo on a CPU."""
    device = torch.device(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(0)  # the launcher shows each rank its own GPU
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=spec.init_method,
        rank=spec.rank,
        world_size=config.learner.num_ranks,
        timeout=timedelta(seconds=config.timeouts.collective_s),
    )
    try:
        yield device
    finally:
        dist.destroy_process_group()


def learner_limits(config: Config, model_path: Path) -> Limits:
    """What a rank holds a Batch to."""
    from asyncrl.launch.model_facts import read_vocab_size

    return Limits(
        vocab_size=read_vocab_size(model_path),
        group_size=config.rollout.group_size,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_completion_tokens=config.rollout.max_completion_tokens,
    )
