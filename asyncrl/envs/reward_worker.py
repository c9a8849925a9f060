"""A reward worker: `python -m asyncrl.envs.reward_worker PARENT_PID`, started by reward_process.py, reward_import.py.

It runs one reward, which reward_messages.py's frames ask for over the original stdin and stdout: one call at a
time on the main thread, or, for an async reward, as many at once as the pool sends, on one event loop. What the
reward prints goes to stderr, because stdout carries the frames. The worker ends with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import inspect
import itertools
import math
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Iterable, Mapping, Set
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from asyncrl.envs.reward_messages import (
    LENGTH_BYTES,
    VOTE,
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
from asyncrl.user_code import read_source, user_failure

PR_SET_PDEATHSIG = 1
MAX_EXTRAS = 100
"""Numbers besides "score" in one dict: each becomes a metric of its own."""
MAX_EXTRA_KEY_CHARACTERS = 100

_decoder = msgspec.msgpack.Decoder(RewardRequest)


def main() -> None:
    _end_with_parent(int(sys.argv[1]))
    _end_first_without_memory()
    frames_in, frames_out = _take_over_stdio()
    spec = msgspec.msgpack.decode(_receive(frames_in), type=RewardSpec)
    try:
        source = spec.source if spec.source is not None else read_source(spec.name)
        reward = resolve_reward(msgspec.structs.replace(spec, source=source))
        reward.load()
    except ConfigError as error:
        _send(frames_out, WorkerReady(error=str(error)))
        return
    except BaseException as error:  # the user's module may raise anything
        why = f"reward {spec.name!r}: importing it failed with {one_line(error)}"
        _send(frames_out, WorkerReady(error=why))
        return
    _send(frames_out, WorkerReady(traits=reward.traits, source=source))
    if reward.traits.is_async:
        asyncio.run(_serve_async(reward, frames_in, frames_out, spec.timeout_s))
    else:
        _serve(reward, frames_in, frames_out)


def _serve(reward: Reward, frames_in: BinaryIO, frames_out: BinaryIO) -> None:
    while body := _receive(frames_in):
        request = _decoder.decode(body)
        try:
            result = reward.call(request)
            if inspect.isawaitable(result):
                # Of a function that does not look async: a lambda, a decorated one.
                result = asyncio.run(_outcome_of(result))
            reply = reply_of(reward, request, result)
        except BaseException as error:  # whatever it raises, the next call is served
            reply = RewardReply(request.number, error=describe_failure(error))
        _send(frames_out, reply)


async def _outcome_of(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def _serve_async(reward: Reward, frames_in: BinaryIO, frames_out: BinaryIO, timeout_s: float) -> None:
    reader = asyncio.StreamReader()  # frames_in has read nothing ahead: no call is sent before WorkerReady
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), frames_in
    )

    async def answer(request: RewardRequest) -> None:
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                reply = reply_of(reward, request, await reward.call(request))
        except BaseException as error:  # a CancelledError of its own among them
            timed_out = isinstance(error, TimeoutError) and deadline.expired()
            said = one_line(error) if timed_out else describe_failure(error)
            reply = RewardReply(request.number, error=said, timed_out=timed_out)
        _send(frames_out, reply)

    async with asyncio.TaskGroup() as calls:
        while header := await reader.read(1):
            header += await reader.readexactly(LENGTH_BYTES - 1)
            body = await reader.readexactly(int.from_bytes(header, "little"))
            calls.create_task(answer(_decoder.decode(body)))


_num_failures = itertools.count(1)


def describe_failure(error: BaseException) -> str:
    """What is said of it, with the innermost line of the user's own.

    The whole traceback of the 1st, the 10th, the 100th ... failure goes to stderr, which is the server's log.
    """
    if str(next(_num_failures)).strip("0") == "1":
        traceback.print_exception(error)
    return user_failure(error)


def reply_of(reward: Reward, request: RewardRequest, result: Any) -> RewardReply:
    """What the reward returned, as values. Raises TypeError, ValueError for what is no list of the right length."""
    if not reward.traits.takes_group:
        return RewardReply(request.number, [read_value(result)])
    if isinstance(result, str | bytes | Mapping | Set) or not isinstance(result, Iterable):
        raise TypeError(f"it returned {result!r:.200}, not a list with a number for each completion")
    results = list(result)
    if len(results) != len(request.completions):
        raise ValueError(f"it returned {len(results)} values for {len(request.completions)} completions")
    return RewardReply(request.number, [read_value(value) for value in results])


def read_value(value: Any) -> RewardValue:
    """A number; a dict with "score" and other numbers; None, which is no error; or the error.

    An exception, as one value of a list, is the failure of that completion.
    """
    if isinstance(value, dict):
        if "score" not in value:
            return RewardValue(error=f"it returned a dict without 'score': {value!r:.200}")
        score = read_value(value["score"])
        extras = {str(key): _number(item) for key, item in value.items() if key != "score"}
        numbers = {key: number for key, number in extras.items() if _is_usable(number)}
        if VOTE in value and VOTE not in numbers:
            numbers[VOTE] = _stand_in(value[VOTE])
        if len(numbers) > MAX_EXTRAS or any(len(key) > MAX_EXTRA_KEY_CHARACTERS for key in numbers):
            return RewardValue(
                error=f"it returned a dict with {len(numbers)} numbers beside 'score'; at most {MAX_EXTRAS}, with "
                f"keys of at most {MAX_EXTRA_KEY_CHARACTERS} characters, can be metrics"
            )
        return msgspec.structs.replace(score, extras={} if score.error else numbers)
    if value is None:
        return RewardValue()
    if isinstance(value, Exception):
        return RewardValue(error=one_line(value))
    number = _number(value)
    if not math.isfinite(number):
        return RewardValue(error=f"it returned {value!r:.200}, not a finite number")
    if not _is_usable(number):
        return RewardValue(error=f"it returned {value!r:.200}, more than {MAX_ABS_REWARD:g} in size")
    return RewardValue(number)


def _stand_in(answer: Any) -> float:
    """A whole number of 48 bits for a text, or for no answer: votes are only compared."""
    return float(int.from_bytes(hashlib.blake2b(repr(answer).encode(), digest_size=6).digest(), "little"))


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


def _end_first_without_memory() -> None:
    """Has the kernel, when memory runs out, end this process before the rollout server."""
    with contextlib.suppress(OSError):  # no Linux
        Path("/proc/self/oom_score_adj").write_text("1000")


def _take_over_stdio() -> tuple[BinaryIO, BinaryIO]:
    """The pool's two pipes, as descriptors of their own that user code and its children never see."""
    frames_in, frames_out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return frames_in, frames_out


def _receive(frames_in: BinaryIO) -> bytes:
    """The next frame; empty at the end of the stream."""
    return frames_in.read(int.from_bytes(frames_in.read(LENGTH_BYTES), "little"))


def _send(frames_out: BinaryIO, message: msgspec.Struct) -> None:
    frames_out.write(frame(message))
    frames_out.flush()


if __name__ == "__main__":
    main()
