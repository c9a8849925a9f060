"""From a configuration to one that can run: everything checked, the models brought, the data tokenised."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import Config
from asyncrl.envs.dataset import Dataset
from asyncrl.envs.reward_checks import models_to_fetch
from asyncrl.envs.supervised import SupervisedDataset
from asyncrl.errors import ConfigError
from asyncrl.launch.algorithm_checks import named_models
from asyncrl.launch.model_facts import read_vocab_size
from asyncrl.launch.preflight import check_config, check_model, check_rewards
from asyncrl.launch.resources import ROLES, Placements
from asyncrl.stream.codec import Limits
from asyncrl.stream.sizes import max_eval_completion_tokens


@dataclass(frozen=True, slots=True)
class Prepared:
    """A configuration that can run, with its model and data."""

    config: Config
    model_path: Path
    dataset: Dataset
    eval_dataset: Dataset
    """Of data.eval; empty when there is none."""
    supervised: SupervisedDataset
    """Of data.supervised, for people to see: the ranks read it for themselves; empty when there is none."""
    placements: Placements
    device: str
    """cpu | cuda"""


async def prepare(config: Config, start: Collection[str] = ROLES, *, resumes: bool = False) -> Prepared:
    """Asks what `asyncrl check` asks, and brings the models. Raises ConfigError or DataError.

    `start`: the roles whose processes this launcher starts; the others need no devices here. `resumes`: whether the
    run directory is there already.
    """
    examined = check_config(config, start, resumes=resumes)
    if "rollout-server" in start and await fetch_reward_models(config):
        check_rewards(config, [*examined.rows, *examined.eval_rows])
    model_path = await fetch_model(config.model)
    for key, name in named_models(config).items():
        await fetch_model(name, key)
    dataset, eval_dataset, supervised = check_model(examined, model_path)
    return Prepared(
        config, model_path, dataset, eval_dataset, supervised, examined.placements, examined.device
    )


async def fetch_reward_models(config: Config) -> bool:
    """Brings the reward models of the Hub here, for the processes of this node. Returns whether there were any.

    Raises ConfigError for one that cannot be brought.
    """
    names = models_to_fetch(config)
    for name in names:
        await fetch_model(name, "reward")
    for name in models_to_fetch(config):
        raise ConfigError(f"reward: {name!r} is no model of the Hub; name one, or a folder")
    return bool(names)


async def fetch_model(name: str, key: str = "model") -> Path:
    """The model's folder, made or downloaded in a subprocess: this process stays without torch.

    `key`: where the config names it. Raises ConfigError.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "asyncrl.models", name, stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):  # Ctrl-C reached it too
            process.kill()
        await process.wait()
        raise
    *_, said = output.decode().splitlines() or [""]
    if process.returncode:
        said = said or f"python -m asyncrl.models ended with exit code {process.returncode}; see above"
        raise ConfigError(f"{key}: {name!r} could not be brought here: {said}")
    return Path(said)


def prompts_found(dataset: Dataset, num_used: int | None = None) -> str:
    """How many prompts there are, how many of them are used, and what became of the other rows: for people."""
    filtered = f", {dataset.num_filtered} filtered" if dataset.num_filtered else ""
    too_long = f", {dataset.num_too_long} dropped as too long" if dataset.num_too_long else ""
    used = f"the first {num_used} of " if num_used is not None and num_used < len(dataset) else ""
    return f"{used}{len(dataset)} prompts from {dataset.source}{filtered}{too_long}"


def supervised_found(dataset: SupervisedDataset) -> str:
    """As `prompts_found`, of the rows of data.supervised."""
    total = dataset.total
    left_out = "".join(
        f", {number} {what}"
        for number, what in (
            (total.num_filtered, "filtered"),
            (total.num_without_completion, "without a completion"),
            (total.num_too_long, "dropped as too long"),
        )
        if number
    )
    num_tokens = int(dataset.completion_lengths.sum())
    return f"{total.num_kept} rows from {total.name}, {num_tokens} tokens that train{left_out}"


def message_limits(config: Config, model_path: Path) -> Limits:
    """What every process of a run holds received messages to."""
    return Limits(
        vocab_size=read_vocab_size(model_path),
        group_size=config.rollouts_per_group,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_completion_tokens=config.rollout.max_completion_tokens,
        eval_num_samples=config.eval.num_samples,
        eval_max_completion_tokens=max_eval_completion_tokens(config),
    )
