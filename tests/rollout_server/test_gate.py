"""The gate: no submission may be inside the engine, unscheduled, when `close` returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from asyncrl.errors import EngineError
from asyncrl.rollout_server.gate import Gate


async def settle() -> None:
    """Lets every task that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_submissions_wait_until_the_gate_opens() -> None:
    async def scenario() -> list[str]:
        gate, log = Gate(), []

        async def submit() -> None:
            async with gate.submission("a"):
                log.append("in")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(submit())
            await settle()
            log.append("opened")
            gate.open()
        return log

    assert asyncio.run(scenario()) == ["opened", "in"]


# Caught: `close` that does not wait for `_drained`.
def test_close_waits_for_the_first_token_and_not_for_the_end() -> None:
    async def scenario() -> list[str]:
        gate, log = Gate(), []
        gate.open()
        first_token, finish = asyncio.Event(), asyncio.Event()

        async def submit() -> None:
            async with gate.submission("a") as submission:
                await first_token.wait()
                submission.scheduled()
                log.append("scheduled")
                await finish.wait()
                log.append("finished")

        async def close() -> None:
            await gate.close(timeout_s=10)
            log.append("closed")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(submit())
            await settle()
            tasks.create_task(close())
            await settle()
            first_token.set()
            await settle()
            finish.set()
        return log

    assert asyncio.run(scenario()) == ["scheduled", "closed", "finished"]


# Caught: `while not self._is_open` turned into `if`: a waiter woken by `open` passes a gate closed since.
def test_a_waiter_woken_by_open_does_not_pass_a_gate_that_closed_again() -> None:
    async def scenario() -> tuple[bool, bool]:
        gate, passed = Gate(), asyncio.Event()

        async def submit() -> None:
            async with gate.submission("a"):
                passed.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(submit())
            await settle()
            gate.open()
            await gate.close(timeout_s=10)
            await settle()
            while_closed = passed.is_set()
            gate.open()
        return while_closed, passed.is_set()

    assert asyncio.run(scenario()) == (False, True)


def _raises(gate: Gate) -> Coroutine[Any, Any, None]:
    async def submit() -> None:
        async with gate.submission("a"):
            raise ValueError("refused")

    return submit()


def _cancelled(gate: Gate) -> Coroutine[Any, Any, None]:
    async def submit() -> None:
        async with gate.submission("a"):
            raise asyncio.CancelledError

    return submit()


# Caught: no `finally` around the yield.
@pytest.mark.parametrize("submit", [_raises, _cancelled])
def test_a_submission_that_fails_does_not_hold_the_gate(
    submit: Callable[[Gate], Coroutine[Any, Any, None]],
) -> None:
    async def scenario() -> None:
        gate = Gate()
        gate.open()
        await asyncio.gather(asyncio.ensure_future(submit(gate)), return_exceptions=True)
        await gate.close(timeout_s=10)

    asyncio.run(scenario())


def test_close_names_who_was_not_scheduled_in_time_and_opens_again() -> None:
    async def scenario() -> bool:
        gate = Gate()
        gate.open()
        async with gate.submission("slow"):
            with pytest.raises(
                EngineError, match=r"1 requests were not scheduled within 0.01 s, among them slow"
            ):
                await gate.close(timeout_s=0.01)
            return gate.is_open

    assert asyncio.run(scenario())


def test_a_failed_gate_raises_to_those_who_wait_and_those_who_come() -> None:
    async def scenario() -> list[BaseException | None]:
        gate = Gate()

        async def submit() -> None:
            async with gate.submission("a"):
                pass

        waiting = asyncio.ensure_future(submit())
        await settle()
        gate.fail(EngineError("died"))
        gate.fail(EngineError("later"))
        with pytest.raises(EngineError, match="died"):
            gate.open()
        return await asyncio.gather(waiting, submit(), return_exceptions=True)

    assert [str(error) for error in asyncio.run(scenario())] == ["died", "died"]


def test_an_id_in_use_is_refused() -> None:
    async def scenario() -> None:
        gate = Gate()
        gate.open()
        async with gate.submission("a"):
            with pytest.raises(EngineError, match="'a' is already being submitted"):
                async with gate.submission("a"):
                    pass

    asyncio.run(scenario())
