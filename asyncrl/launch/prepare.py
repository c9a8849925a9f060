"""Everything that can be wrong with a configuration, looked at before any process of the run starts."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import Config
from asyncrl.envs.dataset import Dataset, load_rows, load_tokenizer, tokenize
from asyncrl.envs.rewards import check_answers, resolve_reward
from asyncrl.errors import ConfigError
from asyncrl.launch.model_facts import check_length, read_vocab_size
from asyncrl.launch.resources import Placements, available_cores, count_gpus, place_processes
from asyncrl.stream.codec import Limits


@dataclass(frozen=True, slots=True)
class Prepared:
    """A configuration that can run, with its model and data."""

    config: Config
    model_path: Path
    dataset: Dataset
    placements: Placements
    device: str
    """cpu | cuda"""


async def prepare(config: Config) -> Prepared:
    """Checks resources, reward and data, and brings the model. Raises ConfigError or DataError."""
    num_gpus = count_gpus(config)
    placements = place_processes(config, cores=available_cores(), num_gpus=num_gpus)
    resolve_reward(config.reward, config.data.answer_key)
    rows = load_rows(config.data, config.seed)
    check_answers(config.reward, rows, config.data.answer_key, config.data.train)
    model_path = await fetch_model(config.model)
    check_length(model_path, config.data.max_prompt_tokens + config.rollout.max_completion_tokens)
    dataset = tokenize(rows, config.data, load_tokenizer(model_path))
    return Prepared(config, model_path, dataset, placements, "cuda" if num_gpus else "cpu")


async def fetch_model(name: str) -> Path:
    """The model's folder, made or downloaded in a subprocess: this process stays without torch."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "asyncrl.models", name, stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise ConfigError(f"model: {name!r} could not be brought here; the reason stands above")
    return Path(output.decode().splitlines()[-1])


def message_limits(config: Config, model_path: Path) -> Limits:
    """What every process of a run holds received messages to."""
    return Limits(
        vocab_size=read_vocab_size(model_path),
        group_size=config.rollout.group_size,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_completion_tokens=config.rollout.max_completion_tokens,
    )
