"""How reward functions of verl, of TRL and of our own are called, and what is said of those that cannot be."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from reward_cases import request

from asyncrl.envs.reward_styles import Reward, user_reward
from asyncrl.envs.reward_worker import read_value, reply_of
from asyncrl.errors import ConfigError

CHAT = [{"role": "user", "content": "2 + 3?"}]


def reward(function: Callable[..., Any], style: str = "auto", **kwargs: Any) -> Reward:
    return user_reward(function, "mine:f", style, kwargs)


def test_our_own_style_gets_completion_and_row() -> None:
    def brevity(completion: str, row: dict[str, Any], scale: float = 1.0) -> float:
        return scale * len(completion) + row["bonus"]

    own = reward(brevity, scale=10.0)
    assert (own.traits.takes_group, own.traits.is_async) == (False, False)
    assert own.call(request("abc", row={"bonus": 1})) == 31.0


def test_the_functions_of_the_docs_are_called_as_the_docs_say() -> None:
    # Mutation: rename a parameter of one in docs/rewards.md -> it is called in another style, or refused.
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    functions: dict[str, Callable[..., Any]] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, functions)
    row = {"prompt": CHAT, "answer": "5", "reward_model": {"ground_truth": "5"}}
    call = {name: reward(functions[name]).call for name in ("brevity", "compute_score", "longest_wins")}
    assert call["brevity"](request("ab", row=row)) == -0.002
    assert call["compute_score"](request("5 ", row=row)) == {"score": 1.0, "acc": 1.0}
    assert call["longest_wins"](request("a", "bb", row=row, prompt=CHAT)) == [0.0, 1.0]


def test_a_verl_file_gets_what_verl_gives_it() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        return {"score": 1.0, "seen": (data_source, solution_str, ground_truth, extra_info)}

    row = {"reward_model": {"style": "rule", "ground_truth": "72"}, "answer": "x", "extra_info": {"index": 7}}
    call = reward(compute_score).call
    # Catches: the answer column instead of verl's ground truth.
    assert call(request("so 72", row=row, answer="x", data_source="openai/gsm8k"))["seen"] == (
        "openai/gsm8k",
        "so 72",
        "72",
        {"index": 7},
    )
    # A row of another make: its answer is the ground truth, and there is no extra information.
    for row in ({"answer": "5"}, {"answer": "5", "reward_model": {"ground_truth": None}, "extra_info": None}):
        assert call(request("a", row=row, answer="5"))["seen"] == ("", "a", "5", {})


def test_verls_scorers_take_only_what_they_name() -> None:
    def compute_score(solution_str: str, ground_truth: str, method: str = "strict") -> Any:
        return solution_str, ground_truth, method

    assert reward(compute_score, method="flexible").call(request("a", answer="b")) == ("a", "b", "flexible")


def test_a_trl_function_gets_lists_and_columns() -> None:
    def f(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> Any:
        return prompts, completions, completion_ids, columns

    own = reward(f)
    assert own.traits.takes_group
    row = {"prompt": "p", "answer": "a", "level": 3}
    assert own.call(request("x", "yz", row=row, prompt="p")) == (
        ["p", "p"],
        ["x", "yz"],
        [[0], [0, 1]],
        {"answer": ["a", "a"], "level": [3, 3]},
    )


def test_a_trl_function_sees_messages_where_the_prompt_has_messages() -> None:
    def f(completions: Any, **columns: Any) -> Any:
        return [completion[0]["content"] for completion in completions], columns

    contents, columns = reward(f).call(request("x", "y", row={"prompt": CHAT}, prompt=CHAT))
    assert contents == ["x", "y"]
    assert columns == {"prompts": [CHAT, CHAT], "completion_ids": [[0], [0]]}


def test_a_trl_function_without_keywords_gets_the_columns_that_it_names() -> None:
    def f(completions: Any, answer: Any, limit: int) -> Any:
        return completions, answer, limit

    own = reward(f, limit=5)
    assert own.traits.columns == ("answer",)
    assert own.call(request("x", row={"answer": "a", "level": 3, "limit": 1})) == (["x"], ["a"], 5)


def test_objects_and_partials_are_functions_too() -> None:
    class Judge:
        async def __call__(self, completions: list[str], **columns: Any) -> list[float]:
            return [2.0 for _ in completions]

    def scaled(scale: float, completion: str, row: dict[str, Any]) -> float:
        return scale * len(completion)

    judge = reward(Judge())
    assert (judge.traits.takes_group, judge.traits.is_async) == (True, True)
    assert asyncio.run(judge.call(request("a", "b"))) == [2.0, 2.0]
    assert reward(partial(scaled, 3.0)).call(request("ab")) == 6.0


def test_async_functions_are_known() -> None:
    async def ours(completion: str, row: dict[str, Any]) -> float:
        return 1.0

    async def verls(solution_str: str, ground_truth: str) -> float:
        return 1.0

    assert [reward(f).traits.is_async for f in (ours, verls)] == [True, True]
    assert [reward(f).traits.takes_group for f in (ours, verls)] == [False, False]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda text: 1.0, r"style asyncrl.*its parameters are \(text\)"),
        (lambda completion, ground_truth: 1.0, r"style verl.*\(completion, ground_truth\)"),
        (lambda completions, trainer_state: [1.0], r"asyncrl has no 'trainer_state'"),
        (lambda completions, prompt, **columns: [1.0], r"asyncrl has no 'prompt'"),
        (lambda prompts, completions, completion: [1.0], r"asyncrl has no 'completion'"),
        (lambda *args, **kwargs: 1.0, r"\(\*args, \*\*kwargs\), do not say how.*asyncrl, verl, trl"),
        (lambda **kwargs: 1.0, r"\(\*\*kwargs\), do not say how it is called; set reward.style"),
        (Fraction, r"is a class; make an object of it"),
        (lambda a, b, c=1, *, d: 1.0, r"missing a required.*'d'.*\(a, b, c=1, \*, d\)"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_with_its_parameters(
    function: Callable[..., Any], message: str
) -> None:
    # Mutations: only imported, so that it fails in every rollout instead; (*args, **kwargs) called in our style;
    # a column that TRL keeps back taken for one that rows have.
    with pytest.raises(ConfigError, match=message):
        reward(function)


def test_the_style_may_be_said() -> None:
    def f(*texts: Any, **columns: Any) -> Any:
        return texts, columns

    assert reward(f, "asyncrl").call(request("a", row={"x": 1})) == (("a", {"x": 1}), {})
    assert reward(f, "verl").call(request("a"))[1]["solution_str"] == "a"
    assert reward(f, "trl").call(request("a", row={"x": 1}))[1]["x"] == [1]


def test_what_values_are() -> None:
    import numpy as np

    assert [read_value(v).reward for v in (True, 2, np.float32(0.5), np.int64(3))] == [1.0, 2.0, 0.5, 3.0]
    # None is no error and no 0: the reward does not apply.
    assert (read_value(None).reward, read_value(None).error) == (None, "")
    value = read_value({"score": 0.5, "acc": True, "text": "72", "nan": float("nan"), "n": 3})
    assert (value.reward, value.extras) == (0.5, {"acc": 1.0, "n": 3.0})
    for bad in ("1", [1.0], {}, {"acc": 1.0}, {"score": "1"}, float("nan"), float("-inf"), -1e31, object()):
        assert read_value(bad).error.startswith("it returned ")
        assert read_value(bad).reward is None


def test_an_answer_is_a_number_or_has_one_that_stands_for_it() -> None:
    # Mutations: left out like other texts -> no maj@N of verl's rewards; hash(), which differs between processes.
    def pred(answer: object) -> float:
        return read_value({"score": 1.0, "pred": answer}).extras["pred"]

    assert pred(72) == 72.0
    assert pred("\\frac{1}{2}") == 191556277053459.0
    answers = ["72", "72.0", "x", "", None]
    assert len({pred(answer) for answer in answers}) == len(answers)
    assert read_value({"score": 1.0}).extras == {}


def test_an_exception_in_a_list_fails_its_completion_alone() -> None:
    # As asyncio.gather(..., return_exceptions=True) gives them. Mutation: float() of it fails -> "not a number".
    own = reward(lambda completions: completions)
    reply = reply_of(own, request("a", "b"), [1.0, TimeoutError("no answer")])
    assert [(value.reward, value.error) for value in reply.values] == [
        (1.0, ""),
        (None, "TimeoutError: no answer"),
    ]


def test_each_of_a_dicts_numbers_is_a_metric_so_they_are_few() -> None:
    # Mutation: no bound -> a reward whose keys are texts makes a metric of each, and no message holds them.
    assert len(read_value({"score": 1.0, **{str(n): n for n in range(100)}}).extras) == 100
    for extras in ({str(n): n for n in range(101)}, {"k" * 101: 1}):
        value = read_value({"score": 1.0, **extras})
        assert (value.reward, value.extras) == (None, {})
        assert f"{len(extras)} numbers beside 'score'; at most 100" in value.error
    # What is no number makes no metric.
    assert read_value({"score": 1.0, **{str(n): "text" for n in range(101)}}).reward == 1.0


def test_arrays_are_lists_of_values_and_sets_are_not() -> None:
    import numpy as np

    own = reward(lambda completions: completions)
    reply = reply_of(own, request("a", "b"), np.array([0.5, 1.5]))
    assert [value.reward for value in reply.values] == [0.5, 1.5]
    # Mutation: list(result) of a set -> values in the order of their hashes.
    for unordered in ({0.5, 1.5}, {0.5: "a", 1.5: "b"}.keys()):
        with pytest.raises(TypeError, match="not a list with a number for each completion"):
            reply_of(own, request("a", "b"), unordered)
