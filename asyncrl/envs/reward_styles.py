"""The three ways in which a reward function of the user's own may ask to be called.

| style | call | answer |
|---|---|---|
| asyncrl | f(completion, row) | one value |
| verl | f(data_source=, solution_str=, ground_truth=, extra_info=), those of them that it takes | one value |
| trl | f(prompts=, completions=, completion_ids=, **columns), lists in | a list of values |

A value is a number, a dict with "score" (its other numbers become components of their own), or None: this reward
does not apply to this completion. Any of them may be async, and gets the `kwargs` of its table besides.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncrl.envs.reward_messages import RewardRequest, RewardTraits
from asyncrl.errors import ConfigError

FORMS = (
    "f(completion, row), verl's f(data_source, solution_str, ground_truth, extra_info), "
    "or TRL's f(completions, **columns)"
)
_VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
_TRL_NAMES = ("prompts", "completions", "completion_ids")
_TRL_KEPT_BACK = {"prompt", "completion"}
"""Columns that TRL keeps from the keywords."""
_TRL_ABSENT = {"trainer_state", "log_extra", "log_metric", "environments"}
"""Keywords of TRL's trainer that have no counterpart here."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward that workers can call."""

    call: Callable[[RewardRequest], Any]
    """-> the value of the one completion, or a list of values where it takes groups; an awaitable of it
    where it is async."""
    traits: RewardTraits
    load: Callable[[], None] = lambda: None
    """What takes long or much memory: called in the worker, before its first request."""


def user_reward(function: Callable[..., Any], name: str, style: str, kwargs: dict[str, Any]) -> Reward:
    """`function` as a reward. Raises ConfigError when it cannot be called in that style."""
    if inspect.isclass(function):
        raise ConfigError(
            f"reward {name!r} is a class; make an object of it at the top of its file, and name that"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of C code: its parameters are unknown
        signature = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in ("completion", "row")]
        )
    if style == "auto":
        style = _detect(signature)
    if not style:
        raise ConfigError(
            f"reward {name!r}: its parameters, {_shown(signature)}, do not say how it is called; set reward.style "
            f"to {', '.join(_STYLES)}"
        )
    try:
        return _STYLES[style](function, signature, kwargs)
    except TypeError as error:
        raise ConfigError(
            f"reward {name!r} cannot be called in the style {style}: {error}; its parameters are "
            f"{_shown(signature)}, and a reward is {FORMS}; name them so, set reward.style, or give further "
            "ones a value in reward.kwargs"
        ) from error


def takes(signature: inspect.Signature, name: str) -> bool:
    """Whether a function with this signature accepts the keyword `name`."""
    parameters = signature.parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return True
    return name in _keywords(signature)


def _detect(signature: inspect.Signature) -> str:
    """The style that the parameters' names tell; empty where none has a name of its own: (*args, **kwargs)."""
    names = set(signature.parameters)
    if names and all(parameter.kind in _VARIADIC for parameter in signature.parameters.values()):
        return ""
    if names & {"completions", "prompts"}:
        return "trl"
    return "verl" if names & set(_VERL_NAMES) else "asyncrl"


def _asyncrl(function: Callable[..., Any], signature: inspect.Signature, kwargs: dict[str, Any]) -> Reward:
    signature.bind("", {}, **kwargs)

    def call(request: RewardRequest) -> Any:
        return function(request.completions[0], request.row, **kwargs)

    return Reward(call, RewardTraits(is_async=_is_async(function)))


def _verl(function: Callable[..., Any], signature: inspect.Signature, kwargs: dict[str, Any]) -> Reward:
    names = [name for name in _VERL_NAMES if takes(signature, name) and name not in kwargs]
    signature.bind(**dict.fromkeys(names), **kwargs)

    def call(request: RewardRequest) -> Any:
        row = request.row
        truth = row.get("reward_model")
        stated = truth.get("ground_truth") if isinstance(truth, dict) else None
        arguments = {
            "data_source": request.data_source,
            "solution_str": request.completions[0],
            "ground_truth": request.answer if stated is None else stated,
            "extra_info": row.get("extra_info") or {},
        }
        return function(**{name: arguments[name] for name in names}, **kwargs)

    needs_truth = "ground_truth" in names and "ground_truth" in _required(signature)
    return Reward(
        call, RewardTraits(is_async=_is_async(function), compares_with="anything" if needs_truth else "")
    )


def _trl(function: Callable[..., Any], signature: inspect.Signature, kwargs: dict[str, Any]) -> Reward:
    columns = tuple(name for name in _required(signature) if name not in (*_TRL_NAMES, *kwargs))
    if absent := (_TRL_ABSENT | _TRL_KEPT_BACK).intersection(columns):
        raise TypeError(f"asyncrl has no {sorted(absent)[0]!r} to give it")
    names = [name for name in _TRL_NAMES if takes(signature, name)]
    signature.bind(**dict.fromkeys([*names, *columns]), **kwargs)
    reserved = {*_TRL_NAMES, *_TRL_KEPT_BACK, *kwargs}

    def call(request: RewardRequest) -> Any:
        num_completions = len(request.completions)
        own: dict[str, Any] = {
            "prompts": [request.prompt] * num_completions,
            "completions": _as_trl_completions(request),
            "completion_ids": request.completion_ids,
        }
        arguments = {name: own[name] for name in names}
        for column, value in request.row.items():
            if column not in reserved and takes(signature, column):
                arguments[column] = [value] * num_completions
        return function(**arguments, **kwargs)

    return Reward(call, RewardTraits(takes_group=True, is_async=_is_async(function), columns=columns))


_STYLES = {"asyncrl": _asyncrl, "verl": _verl, "trl": _trl}
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _as_trl_completions(request: RewardRequest) -> list[Any]:
    """In the form of the prompt: messages for messages, texts for a text."""
    if isinstance(request.prompt, list):
        return [[{"role": "assistant", "content": text}] for text in request.completions]
    return request.completions


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__  # of an object that can be called
    )


def _required(signature: inspect.Signature) -> list[str]:
    """Parameters without a default."""
    parameters = signature.parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in _VARIADIC]


def _keywords(signature: inspect.Signature) -> set[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name for parameter in signature.parameters.values() if parameter.kind in kinds}


def _shown(signature: inspect.Signature) -> str:
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(inspect.Signature(bare))
