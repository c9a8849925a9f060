"""A reward of the user's own, imported before anything starts: in a worker process, which ends at once.

Importing runs the user's code. Whatever that does (loads torch, starts threads, never returns, ends its process),
the launcher only hears of it.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading

import msgspec

from asyncrl.envs.reward_messages import LENGTH_BYTES, RewardSpec, RewardTraits, WorkerReady, frame
from asyncrl.envs.reward_process import START_TIMEOUT_S, how_it_ended, worker_command
from asyncrl.errors import ConfigError


def import_traits(spec: RewardSpec, timeout_s: float = START_TIMEOUT_S) -> RewardTraits:
    """What the reward is like. Raises ConfigError when it cannot be imported or called, or not within `timeout_s`."""
    with subprocess.Popen(worker_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = threading.Timer(timeout_s, process.kill)
        deadline.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it died: said below
                process.stdin.write(frame(spec))
                process.stdin.flush()
            size = int.from_bytes(process.stdout.read(LENGTH_BYTES), "little")
            answer = process.stdout.read(size)
            code = None if answer else process.wait()
            timed_out = deadline.finished.is_set()
        finally:
            deadline.cancel()
            process.kill()
    if answer:
        ready = msgspec.msgpack.decode(answer, type=WorkerReady)
        if ready.error:
            raise ConfigError(ready.error)
        return ready.traits
    if timed_out:
        raise ConfigError(
            f"reward {spec.name!r} was not imported within {timeout_s:g} s; make its import lighter"
        )
    assert code is not None
    raise ConfigError(f"reward {spec.name!r}: its process ended {how_it_ended(code)} while it was imported")
