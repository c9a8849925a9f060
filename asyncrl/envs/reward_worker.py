"""A reward worker: `python -m asyncrl.envs.reward_worker PARENT_PID ANSWER_KEY REWARD`.

RewardPool starts several and kills the ones that run too long. Frames go over the original stdin and
stdout: four bytes of length (little-endian), then one msgpack object.

    worker -> pool   {"ready": true} or {"error": why the reward cannot be imported}, once
    pool -> worker   {"completion": str, "row": {...}}
    worker -> pool   {"reward": float} or {"error": one line}

What the reward prints goes to stderr, because stdout carries the frames. The worker ends with its parent.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
from typing import Any, BinaryIO

import msgpack

from asyncrl.envs.rewards import Reward, resolve_reward
from asyncrl.errors import ConfigError, one_line
from asyncrl.types import MAX_ABS_REWARD

PR_SET_PDEATHSIG = 1
LENGTH_BYTES = 4


def pack(message: dict[str, Any]) -> bytes:
    """One frame."""
    body: bytes = msgpack.Packer().pack(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def main() -> None:
    parent_pid, answer_key, reward_name = sys.argv[1:]
    _end_with_parent(int(parent_pid))
    frames_in, frames_out = _take_over_stdio()
    try:
        reward = resolve_reward(reward_name, answer_key)
    except ConfigError as error:
        _send(frames_out, {"error": str(error)})
        return
    _send(frames_out, {"ready": True})
    while header := frames_in.read(LENGTH_BYTES):
        body = frames_in.read(int.from_bytes(header, "little"))
        request = msgpack.unpackb(body, strict_map_key=True)
        _send(frames_out, score(reward, request["completion"], request["row"]))


def score(reward: Reward, completion: str, row: dict[str, Any]) -> dict[str, Any]:
    """{"reward": a finite float}, or {"error": why there is none}."""
    try:
        value = reward(completion, row)
        number = float("nan") if isinstance(value, str | bytes) else float(value)
    except Exception as error:
        return {"error": one_line(error)}
    if not math.isfinite(number):
        return {"error": f"the reward returned {value!r:.200}, not a finite number"}
    if abs(number) > MAX_ABS_REWARD:
        return {"error": f"the reward returned {value!r:.200}, more than {MAX_ABS_REWARD:g} in size"}
    return {"reward": number}


def _end_with_parent(parent_pid: int) -> None:
    """Has the kernel kill this process when its parent dies, also when it is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        raise SystemExit("the reward worker's parent is gone")


def _take_over_stdio() -> tuple[BinaryIO, BinaryIO]:
    """The pool's two pipes, as descriptors of their own that user code and its children never see."""
    frames_in, frames_out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return frames_in, frames_out


def _send(frames_out: BinaryIO, message: dict[str, Any]) -> None:
    frames_out.write(pack(message))
    frames_out.flush()


if __name__ == "__main__":
    main()
