"""The rewards and the rows of a run, held against each other before anything starts. Called by preflight.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from asyncrl.config import Config, RewardConfig
from asyncrl.envs.gsm8k import gold_number
from asyncrl.envs.reward_import import import_traits
from asyncrl.envs.reward_messages import RewardTraits
from asyncrl.envs.reward_model import MODEL_PREFIX, find_model
from asyncrl.envs.rewards import resolve_reward, runs_user_code
from asyncrl.envs.rows import answer_of, source_of
from asyncrl.envs.weighted_rewards import applies, reward_spec
from asyncrl.errors import ConfigError, DataError


class LocatedRows(Protocol):
    """Rows that can say where they were read (dataset.SourceRows)."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> dict[str, Any]: ...
    def where(self, index: int) -> str: ...


def resolve_rewards(config: Config) -> list[RewardTraits]:
    """What each of `config.reward` is like. The user's code is imported in processes of its own. Raises ConfigError."""
    specs = [reward_spec(reward, config.timeouts.reward_s) for reward in config.reward]
    return [
        import_traits(spec) if runs_user_code(spec.name) else resolve_reward(spec).traits for spec in specs
    ]


def models_to_fetch(config: Config) -> list[str]:
    """Reward models of the Hub that are not here yet: of those nothing can be checked. Raises ConfigError."""
    names = [
        own.name.removeprefix(MODEL_PREFIX) for own in config.reward if own.name.startswith(MODEL_PREFIX)
    ]
    return [name for name in names if find_model(name) is None]


def check_rows(config: Config, rewards: Sequence[RewardTraits], sources: Iterable[LocatedRows]) -> None:
    """Refuses rows that no reward applies to, or that one which does could never score. Raises DataError.

    `rewards`: what `resolve_rewards` returned. Raises ConfigError for a `data_source` that no row has.
    """
    if not any(own.data_source for own in config.reward) and not any(map(_reads_rows, rewards)):
        return
    seen: set[str] = set()
    for rows in sources:
        for index in range(len(rows)):
            row = rows[index]
            seen.add(data_source := source_of(row, config.data))
            applying = [
                (own, reward)
                for own, reward in zip(config.reward, rewards, strict=True)
                if applies(own, data_source)
            ]
            if not applying:
                raise DataError(
                    f"{rows.where(index)}: no reward applies to its {config.data.source_key} {data_source!r}; "
                    "add a reward without data_source, or with this one"
                )
            for own, reward in applying:
                if problem := _row_problem(own, reward, row, config):
                    raise DataError(f"{rows.where(index)}{problem}")
    _check_sources(config.reward, config.data.source_key, seen)


def _reads_rows(reward: RewardTraits) -> bool:
    return bool(reward.columns or reward.compares_with or not reward.takes_chat)


def _row_problem(own: RewardConfig, reward: RewardTraits, row: dict[str, Any], config: Config) -> str:
    """Why this reward cannot score the row; empty when it can."""
    data = config.data
    if missing := [column for column in reward.columns if column not in row]:
        columns = ", ".join(sorted(row))
        return f", column {missing[0]!r}: missing, and reward {own.name!r} takes it; the row has {columns}"
    if isinstance(row.get(data.prompt_key), list) and not reward.takes_chat:
        return (
            f", column {data.prompt_key!r}: a list of messages, and reward {own.name!r} has no chat template; "
            "add a chat_template.jinja to its folder, or make the prompts strings"
        )
    return _answer_problem(own, reward, row, config) if reward.compares_with else ""


def _answer_problem(own: RewardConfig, reward: RewardTraits, row: dict[str, Any], config: Config) -> str:
    answer = answer_of(row, config.data)
    where = f", column {config.data.answer_key!r}"
    if answer is None:
        columns = ", ".join(sorted(row))
        return (
            f"{where}: missing, and reward {own.name!r} compares with it; the row has {columns}; "
            "set data.answer_key"
        )
    if reward.compares_with == "anything":
        return ""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return f"{where}: {answer!r:.80} is neither a string nor a number"
    if reward.compares_with == "number" and gold_number(str(answer)) is None:
        return f"{where}: {str(answer)[-80:]!r} holds no number that {own.name!r} can compare with"
    return ""


def _check_sources(rewards: Sequence[RewardConfig], source_key: str, seen: set[str]) -> None:
    for reward in rewards:
        if unknown := sorted(set(reward.data_source) - seen):
            raise ConfigError(
                f"reward {reward.name!r}: no row has the {source_key} {unknown[0]!r}; "
                f"the rows have {', '.join(map(repr, sorted(seen)[:20]))}"
            )
