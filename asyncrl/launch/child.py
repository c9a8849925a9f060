"""What a child process of the launcher runs: `python -m asyncrl.launch.child SPEC`, SPEC being JSON.

Set up before anything heavy is imported: it dies with its parent, and stays on its cores.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from types import FrameType

import msgspec

from asyncrl.errors import one_line

PR_SET_PDEATHSIG = 1


class ChildSpec(msgspec.Struct, frozen=True):
    """Everything a child needs to know."""

    role: str
    """learner | rollout-server | coordinator"""
    rank: int
    config_file: str
    model_path: str
    address: str
    """host:port of the coordinator."""
    cores: tuple[int, ...]
    device: str
    """cpu | cuda | cuda:N"""
    parent_pid: int
    init_method: str = ""
    """torch.distributed rendezvous of the learner ranks."""
    report_fd: int = -1
    """coordinator: where it writes a Meeting as JSON once it listens."""
    checkpoint: str = ""
    """learner: the folder that it goes on from; empty: it starts with the initial model."""
    resume: bool = False
    """coordinator: whether the run goes on from its newest checkpoint."""


def die_with_parent(parent_pid: int) -> None:
    """SIGTERM reaches this process when its parent ends in any way, SIGKILL included (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # it ended before the request was made
        sys.exit(f"asyncrl: the launcher (process {parent_pid}) is gone")


def raise_on_sigterm() -> None:
    """SIGTERM unwinds the stack, so that files and sockets are cleaned up."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, leave)


def run(spec: ChildSpec) -> None:
    """Runs the role to its end."""
    from asyncrl.config import load_config

    config = load_config(spec.config_file)
    if spec.role == "learner":
        from asyncrl.launch.learner_process import run_rank

        run_rank(config, spec)
    elif spec.role == "coordinator":
        from asyncrl.launch.torchrun import run_coordinator

        run_coordinator(config, spec.report_fd, resume=spec.resume)
    else:
        from asyncrl.launch.server_process import run_rollout_server

        name = f"{spec.role}-{spec.rank}"
        run_rollout_server(config, spec.model_path, spec.address, name=name, device=spec.device)


def main() -> None:
    """Exit code 0 after a normal end; 1 with the cause as the last line of stderr."""
    spec = msgspec.json.decode(sys.argv[1], type=ChildSpec)
    die_with_parent(spec.parent_pid)
    os.sched_setaffinity(0, spec.cores)
    raise_on_sigterm()
    try:
        run(spec)
        code = 0
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        traceback.print_exc()
        print(f"asyncrl {spec.role} {spec.rank}: {one_line(error)}", file=sys.stderr)
        code = 1
    # Everything is closed. Taking torch and vLLM apart object by object would take seconds, and vLLM would have
    # the last word in the log.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
