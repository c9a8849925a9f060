"""The built-in `math_verify`, in the test's process and in a worker."""

from __future__ import annotations

import asyncio
import threading

import pytest
from reward_cases import in_pool, request

pytest.importorskip("math_verify", reason="the extra `math` is not installed")

from asyncrl.envs.math_answer import math_verify
from asyncrl.envs.reward_messages import RewardSpec
from asyncrl.envs.reward_pool import RewardPool
from asyncrl.types import Status


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        (r"so it is \boxed{\frac{1}{3}}", "1/3", 1.0),
        (r"so it is \boxed{\frac{1}{3}}", r"\frac{1}{3}", 1.0),
        (r"so it is \boxed{\frac{2}{6}}.", r"$\frac{1}{3}$", 1.0),
        (r"\boxed{0.33}", "1/3", 0.0),
        (r"\boxed{(x+1)^2}", "x^2 + 2x + 1", 1.0),
        (r"$x^2$ or \boxed{5}", "5", 1.0),
        ("#### 1,072", "24 + 1048\n#### 1072", 1.0),
        ("no idea", "5", 0.0),
        ("", "5", 0.0),
        (r"\boxed{", "5", 0.0),
    ],
)
def test_expressions_that_are_equal_score_1(completion: str, answer: str, score: float) -> None:
    # Catches: the answer read without its $ (\frac{1}{3} would be the number 3), the marker left in it.
    assert math_verify(completion, answer) == score


def test_an_answer_that_is_no_expression_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="finds no expression in the answer"):
        math_verify("5", "#### $$")


def test_a_thread_scores_the_same() -> None:
    # Catches: the package's own deadlines, which need SIGALRM and so the main thread.
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(math_verify(r"\boxed{\frac{1}{3}}", "1/3")))
    thread.start()
    thread.join(30)
    assert scores == [1.0]


def test_bombs_are_timeouts_and_a_pool_of_two_is_one_of_two_afterwards() -> None:
    async def check(pool: RewardPool) -> None:
        async def score(completion: str, answer: str) -> tuple[float | None, Status]:
            (outcome,) = await pool.score(request(completion, answer=answer))
            return outcome.reward, outcome.status

        bombs = await asyncio.gather(*(score(r"\boxed{9^{9^{9^{9}}}}", "2") for _ in range(4)))
        # Mutation: the package's own deadline -> "not equal", which is a 0.
        assert bombs == [(None, Status.REWARD_TIMEOUT)] * 4
        good = await asyncio.gather(score("3*14=42\n#### 42", "42"), score(r"\boxed{\frac{1}{3}}", "1/3"))
        assert good == [(1.0, Status.SCORED)] * 2
        # Two processes, each replaced twice: a pool of one would have started five.
        assert pool.statistics().num_processes_started == 6

    in_pool(RewardSpec("math_verify", timeout_s=2.0), check, num_workers=2)
