"""`torchrun ... -m asyncrl.cli learner CONFIG`: each process is one learner rank, the coordinator beside rank 0.

rank 0    starts the coordinator's process, reads where it listens, tells the other ranks
all       run the same loop as the ranks that `asyncrl learner` starts by itself
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from asyncrl.config import Config, dump_config
from asyncrl.errors import ConfigError, PeerLost
from asyncrl.launch.child import ChildSpec
from asyncrl.launch.resources import available_cores, count_gpus, place_processes, visible_gpus


class Meeting(msgspec.Struct, frozen=True):
    """What the coordinator's process tells rank 0, and rank 0 the others."""

    address: str
    run_directory: str
    model_path: str
    checkpoint: str
    """That the ranks go on from; empty: they start with the initial model."""


def run_as_torchrun_rank(config: Config, *, resume: bool = False) -> None:
    """Trains as the rank that torchrun's environment names. Raises the first cause of failure."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if num_ranks != config.learner.num_ranks:
        raise ConfigError(
            f"learner.num_ranks: {config.learner.num_ranks}, and torchrun started {num_ranks} processes; "
            "make them equal"
        )
    take_own_cores(config, rank)
    if rank == 0:
        with coordinator_process(config, resume=resume) as meeting:
            _run_rank(config, rank, meeting)
    else:
        _run_rank(config, rank, None)


def take_own_cores(config: Config, rank: int) -> None:
    """The cores and thread counts that `asyncrl learner` would give this rank; before torch is imported."""
    gpus = visible_gpus(config)
    placement = place_processes(config, cores=available_cores(), gpus=gpus, start=("learner",)).learner[rank]
    os.environ |= placement.environment() | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    os.sched_setaffinity(0, placement.cores)


def _run_rank(config: Config, rank: int, meeting: Meeting | None) -> None:
    from asyncrl.launch.learner_process import process_group, serve_rank

    device = f"cuda:{os.environ['LOCAL_RANK']}" if count_gpus(config) else "cpu"
    with process_group(config, rank, device, "env://"):
        met = share(meeting, device)
        spec = ChildSpec(
            role="learner",
            rank=rank,
            config_file=f"{met.run_directory}/config.yaml",
            model_path=met.model_path,
            address=met.address,
            cores=tuple(available_cores()),
            device=device,
            parent_pid=os.getppid(),
            checkpoint=met.checkpoint,
        )
        serve_rank(config, spec)


def share(meeting: Meeting | None, device: str) -> Meeting:
    """Rank 0's meeting on every rank. Collective."""
    import torch
    import torch.distributed as dist

    raw = msgspec.json.encode(meeting) if meeting is not None else b""
    length = torch.tensor([len(raw)], device=device)
    dist.broadcast(length, 0)
    text = torch.zeros(int(length), dtype=torch.uint8)
    if raw:
        text.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    text = text.to(device)
    dist.broadcast(text, 0)
    return msgspec.json.decode(bytes(text.tolist()), type=Meeting)


@contextmanager
def coordinator_process(config: Config, *, resume: bool = False) -> Iterator[Meeting]:
    """The coordinator in a child process, which shares this one's terminal and ends with it."""
    read_fd, write_fd = os.pipe()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config_file:
        config_file.write(dump_config(config))
        config_file.flush()
        spec = ChildSpec(
            role="coordinator",
            rank=0,
            config_file=config_file.name,
            model_path="",
            address="",
            cores=tuple(available_cores()),
            device="cpu",
            parent_pid=os.getpid(),
            report_fd=write_fd,
            resume=resume,
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl.launch.child", msgspec.json.encode(spec).decode()],
            pass_fds=[write_fd],
        )
        os.close(write_fd)
        try:
            yield _read_meeting(read_fd)
            code = process.wait()  # it has deadlines of its own: servers may still be leaving
            if code:
                raise PeerLost(f"the coordinator ended with exit code {code}; its error stands above")
        finally:
            os.close(read_fd)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=2)  # it may be saying why it ends
            process.terminate()
            try:
                process.wait(timeout=config.timeouts.shutdown_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _read_meeting(descriptor: int) -> Meeting:
    """Waits for as long as the coordinator fetches the model; the pipe closes when it ends."""
    raw = os.read(descriptor, 1 << 16)
    if not raw:
        raise PeerLost("the coordinator ended before it listened; its error stands above")
    return msgspec.json.decode(raw, type=Meeting)


def run_coordinator(config: Config, report_fd: int, *, resume: bool) -> None:
    """What the coordinator's process runs: a run whose ranks and servers connect by themselves."""
    from asyncrl.launch.run import Listening, run_until_done

    def report(listening: Listening) -> None:
        meeting = Meeting(
            listening.address,
            str(listening.run_directory),
            str(listening.model_path),
            str(listening.checkpoint or ""),
        )
        os.write(report_fd, msgspec.json.encode(meeting))
        os.close(report_fd)

    path: Path = run_until_done(config, start=(), on_listening=report, resume=resume)
    print(f"done: {path}")
