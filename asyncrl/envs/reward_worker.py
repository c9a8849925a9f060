"""A reward worker: `python -m asyncrl.envs.reward_worker PARENT_PID SPEC`, started by reward_process.py.

It runs one reward, which reward_messages.py's frames ask for over the original stdin and stdout: one call at a
time on the main thread, or, for an async reward, as many at once as the pool sends, on one event loop. What the
reward prints goes to stderr, because stdout carries the frames. The worker ends with its parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any, BinaryIO

import msgspec

from asyncrl.envs.reward_messages import (
    LENGTH_BYTES,
    RewardReply,
    RewardRequest,
    RewardSpec,
    RewardValue,
    WorkerReady,
    frame,
)
from asyncrl.envs.reward_styles import Reward
from asyncrl.envs.rewards import resolve_reward
from asyncrl.errors import ConfigError, one_line
from asyncrl.types import MAX_ABS_REWARD

PR_SET_PDEATHSIG = 1

_decoder = msgspec.msgpack.Decoder(RewardRequest)


def main() -> None:
    parent_pid, spec_json = sys.argv[1:]
    _end_with_parent(int(parent_pid))
    frames_in, frames_out = _take_over_stdio()
    spec = msgspec.json.decode(spec_json, type=RewardSpec)
    try:
        reward = resolve_reward(spec)
        reward.load()
    except ConfigError as error:
        _send(frames_out, WorkerReady(error=str(error)))
        return
    _send(frames_out, WorkerReady("", reward.takes_group, reward.is_async, reward.is_large))
    if reward.is_async:
        asyncio.run(_serve_async(reward, frames_in, frames_out, spec.timeout_s))
    else:
        _serve(reward, frames_in, frames_out)


def _serve(reward: Reward, frames_in: BinaryIO, frames_out: BinaryIO) -> None:
    while header := frames_in.read(LENGTH_BYTES):
        request = _decoder.decode(frames_in.read(int.from_bytes(header, "little")))
        try:
            reply = reply_of(reward, request, reward.call(request))
        except (Exception, SystemExit) as error:
            reply = RewardReply(request.number, error=one_line(error))
        _send(frames_out, reply)


async def _serve_async(reward: Reward, frames_in: BinaryIO, frames_out: BinaryIO, timeout_s: float) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), frames_in
    )

    async def answer(request: RewardRequest) -> None:
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                reply = reply_of(reward, request, await reward.call(request))
        except (Exception, SystemExit) as error:
            timed_out = isinstance(error, TimeoutError) and deadline.expired()
            reply = RewardReply(request.number, error=one_line(error), timed_out=timed_out)
        _send(frames_out, reply)

    async with asyncio.TaskGroup() as calls:
        while header := await reader.read(1):
            header += await reader.readexactly(LENGTH_BYTES - 1)
            body = await reader.readexactly(int.from_bytes(header, "little"))
            calls.create_task(answer(_decoder.decode(body)))


def reply_of(reward: Reward, request: RewardRequest, result: Any) -> RewardReply:
    """What the reward returned, as values. Raises TypeError, ValueError for what is no list of the right length."""
    if not reward.takes_group:
        return RewardReply(request.number, [read_value(result)])
    if isinstance(result, str | bytes | dict) or not isinstance(result, Iterable):
        raise TypeError(f"it returned {result!r:.200}, not a list with a number for each completion")
    results = list(result)
    if len(results) != len(request.completions):
        raise ValueError(f"it returned {len(results)} values for {len(request.completions)} completions")
    return RewardReply(request.number, [read_value(value) for value in results])


def read_value(value: Any) -> RewardValue:
    """A number; a dict with "score" and other numbers; None, which is no error; or the error."""
    if isinstance(value, dict):
        if "score" not in value:
            return RewardValue(error=f"it returned a dict without 'score': {value!r:.200}")
        score = read_value(value["score"])
        extras = {str(key): _number(item) for key, item in value.items() if key != "score"}
        numbers = {key: number for key, number in extras.items() if _is_usable(number)}
        return msgspec.structs.replace(score, extras={} if score.error else numbers)
    if value is None:
        return RewardValue()
    number = _number(value)
    if not math.isfinite(number):
        return RewardValue(error=f"it returned {value!r:.200}, not a finite number")
    if not _is_usable(number):
        return RewardValue(error=f"it returned {value!r:.200}, more than {MAX_ABS_REWARD:g} in size")
    return RewardValue(number)


def _number(value: Any) -> float:
    """NaN for what is no number; a text is none, even one of digits."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _is_usable(number: float) -> bool:
    return abs(number) <= MAX_ABS_REWARD  # false for NaN


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


def _send(frames_out: BinaryIO, message: msgspec.Struct) -> None:
    frames_out.write(frame(message))
    frames_out.flush()


if __name__ == "__main__":
    main()
