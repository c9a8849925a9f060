"""The process of one learner rank: joins the process group, loads its shards, runs the loop."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from asyncrl.config import Config, shared_digest
from asyncrl.errors import PeerLost, one_line
from asyncrl.launch.child import ChildSpec
from asyncrl.launch.prepare import message_limits
from asyncrl.learner.loop import LearnerLoop
from asyncrl.learner.mesh import make_mesh
from asyncrl.learner.publish import SnapshotPublisher
from asyncrl.learner.update import PolicyLearner
from asyncrl.stream.connections import BlockingConnection
from asyncrl.stream.envelope import Envelope
from asyncrl.stream.messages import Failed, RankHello, RankWelcome, Stop


def run_rank(config: Config, spec: ChildSpec) -> None:
    """Joins the process group and trains to the end. Raises the first cause."""
    with process_group(config, spec.rank, spec.device, spec.init_method):
        serve_rank(config, spec)


def serve_rank(config: Config, spec: ChildSpec) -> None:
    """Trains to the end; the ranks export the model into the run directory. Raises the first cause."""
    envelope = Envelope(f"learner-{spec.rank}", max_message_bytes=config.stream.max_message_bytes)
    with BlockingConnection(
        spec.address,
        envelope,
        message_limits(config, Path(spec.model_path)),
        heartbeat_s=config.timeouts.heartbeat_s,
        connect_s=config.timeouts.connect_s,
    ) as connection:
        try:
            _serve(config, spec, connection, envelope)
        except PeerLost:
            raise
        except Exception as error:
            with suppress(PeerLost):  # it would hide the error itself
                connection.send(Failed(one_line(error), traceback.format_exc()))
            raise


def _serve(config: Config, spec: ChildSpec, connection: BlockingConnection, envelope: Envelope) -> None:
    device = torch.device(spec.device)
    mesh = make_mesh(
        device.type, config.learner.num_ranks, config.learner.replicas, config.learner.tensor_parallel_size
    )
    learner = PolicyLearner(Path(spec.model_path), config, mesh=mesh)
    first_version = learner.load(Path(spec.checkpoint)) if spec.checkpoint else 0
    say_hello(config, spec.rank, connection)
    publisher = SnapshotPublisher(learner, config, device, run=envelope.run, incarnation=envelope.incarnation)
    try:
        run_directory = Path(spec.config_file).parent
        loop = LearnerLoop(config, learner, connection, publisher, run_directory, first_version=first_version)
        loop.run()
        if config.learner.export:
            learner.export(run_directory / "model")
        loop.say_goodbye()
    finally:
        publisher.close()


def say_hello(config: Config, rank: int, connection: BlockingConnection) -> None:
    """Introduces the rank; the welcome carries the run and the incarnation. Raises PeerLost."""
    connection.send(RankHello(shared_digest(config), rank, config.learner.num_ranks))
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
def process_group(config: Config, rank: int, device_name: str, init_method: str) -> Iterator[None]:
    """torch.distributed over the learner ranks: NCCL on GPUs, gloo on a CPU."""
    device = torch.device(device_name)
    if device.type == "cuda":  # without an index: the launcher shows a rank its own GPU
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=config.learner.num_ranks,
        timeout=timedelta(seconds=config.timeouts.collective_s),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
