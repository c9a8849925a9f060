"""Rewards by name: built-ins, functions of the user's own, and models. A new built-in is one line of BUILT_IN.

Every name is resolved before anything starts (reward_checks.py), and again by reward workers, in their process.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable

from asyncrl.envs.gsm8k import gsm8k_flexible, gsm8k_strict
from asyncrl.envs.gsm8k_verl import verl_gsm8k_flexible, verl_gsm8k_strict
from asyncrl.envs.math_answer import INSTALL, load_math_verify, math_verify
from asyncrl.envs.reward_messages import RewardRequest, RewardSpec, RewardTraits
from asyncrl.envs.reward_model import MODEL_PREFIX, model_reward
from asyncrl.envs.reward_styles import FORMS, Reward, user_reward
from asyncrl.errors import ConfigError
from asyncrl.user_code import did_you_mean, import_function, names_user_code, split_spec

VERL_FUNCTION = "compute_score"
"""What a file that is named without a function is asked for."""


def exact_match(completion: str, answer: str) -> float:
    """1.0 when both are the same text apart from white space around it, else 0.0."""
    return float(completion.strip() == answer.strip())


BUILT_IN: dict[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "gsm8k_strict": gsm8k_strict,
    "gsm8k_flexible": gsm8k_flexible,
    "verl_gsm8k_strict": verl_gsm8k_strict,
    "verl_gsm8k_flexible": verl_gsm8k_flexible,
    "math_verify": math_verify,
}
"""name -> f(completion, answer, **kwargs)."""
NUMERIC = ("gsm8k_strict", "gsm8k_flexible")
"""Built-ins that no answer without a number can ever satisfy."""


def resolve_reward(spec: RewardSpec) -> Reward:
    """The reward of that name. Imports the user's code, and no torch itself. Raises ConfigError with the reason."""
    name = spec.name
    if name in BUILT_IN:
        return _built_in(spec)
    if name.startswith(MODEL_PREFIX):
        return model_reward(name.removeprefix(MODEL_PREFIX), spec.kwargs)
    if runs_user_code(name):
        function = import_function(name, "reward", VERL_FUNCTION, source=spec.source)
        return user_reward(function, name, spec.style, spec.kwargs)
    raise ConfigError(
        f"reward: {name!r} is no reward{did_you_mean(name, BUILT_IN)}; use {', '.join(BUILT_IN)}, "
        f"{MODEL_PREFIX}FOLDER, or module:attr or path/to/file.py:attr of {FORMS}"
    )


def runs_user_code(name: str) -> bool:
    """Whether `resolve_reward` imports a module of the user's own."""
    return name not in BUILT_IN and not name.startswith(MODEL_PREFIX) and names_user_code(name)


def _built_in(spec: RewardSpec) -> Reward:
    function = BUILT_IN[spec.name]
    try:
        inspect.signature(function).bind("", "", **spec.kwargs)
    except TypeError as error:
        taken = list(inspect.signature(function).parameters)[2:]
        raise ConfigError(
            f"reward {spec.name!r}: its kwargs, {spec.kwargs}, do not fit ({error}); it takes "
            f"{', '.join(taken) or 'none: leave them out'}"
        ) from error
    if function is math_verify and importlib.util.find_spec("math_verify") is None:
        raise ConfigError(f"reward {spec.name!r} needs the package math-verify; {INSTALL}")

    def call(request: RewardRequest) -> float:
        return function(request.completions[0], str(request.answer), **spec.kwargs)

    load = load_math_verify if function is math_verify else (lambda: None)
    return Reward(call, RewardTraits(compares_with="number" if spec.name in NUMERIC else "text"), load)


def reward_labels(names: list[str]) -> list[str]:
    """What each reward is called in metrics: its last word, such as `brevity` for `rewards.py:brevity`.

    Of several with the same one, the later ones are numbered: brevity, brevity_2.
    """
    labels: list[str] = []
    for name in names:
        if name.startswith(MODEL_PREFIX):
            word = name.rstrip("/").rpartition("/")[2].removeprefix(MODEL_PREFIX)
        else:
            path, attr = split_spec(name)
            word = attr or path.rpartition("/")[2].removesuffix(".py")
        number = 2
        label = word
        while label in labels:
            label = f"{word}_{number}"
            number += 1
        labels.append(label)
    return labels
