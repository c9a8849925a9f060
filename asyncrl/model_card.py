"""The model card of a trained model: README.md as the Hugging Face Hub reads it, from a run directory.

The launcher writes one into `<run>/model` when a run ends, `asyncrl export` into what it exports. Torch-free.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from asyncrl.config import AlgorithmConfig, Config, SourceConfig, load_config, own_options
from asyncrl.config.learner import LoraTable
from asyncrl.errors import DataError
from asyncrl.hub import is_hub_name

CARD_NAME = "README.md"
NUM_LAST = 5
"""Versions at the end whose mean reward is shown."""
PATH_BEGINNINGS = ("/", "~", "./", "../")
EVALUATION_AREA = "val-core/"
"""The numbers of an evaluation that are shown: verl's name for the main ones."""

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run amounted to, computed from the lines of its files. Rewards are means over a batch."""

    num_versions: int
    first_reward: float
    last_reward: float
    best_reward: float
    best_version: int
    mean_last_rewards: float
    """Of the last NUM_LAST versions."""
    mean_staleness: float
    """Over all trained tokens."""
    max_staleness: int
    num_trained_tokens: int
    training_s: float
    """Of all steps: since a rollout server held version 0."""
    evaluations: dict[str, tuple[float, float]]
    """First and last value of each number of the evaluations, by name."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A JSONL file of a run directory; a line that is still being written is left out. Raises DataError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def figures_of(trained: Sequence[Metrics], evaluations: Sequence[Metrics] = ()) -> Figures:
    """`trained`: a line a version, as in metrics.jsonl; `evaluations`: the numbers of each evaluation, in order.

    Raises DataError when no version was trained.
    """
    if not trained:
        raise DataError("metrics.jsonl has no trained version, so there is nothing to say of the model")
    rewards = [line["critic/score/mean"] for line in trained]
    num_tokens = [line["batch/trained_tokens"] for line in trained]
    best = rewards.index(max(rewards))
    last = rewards[-NUM_LAST:]
    ages = [line["staleness/mean"] * n for line, n in zip(trained, num_tokens, strict=True)]
    return Figures(
        num_versions=int(trained[-1]["training/policy_version"]),
        first_reward=rewards[0],
        last_reward=rewards[-1],
        best_reward=rewards[best],
        best_version=int(trained[best]["training/policy_version"]),
        mean_last_rewards=sum(last) / len(last),
        mean_staleness=sum(ages) / max(1.0, sum(num_tokens)),
        max_staleness=int(max(line["staleness/max"] for line in trained)),
        num_trained_tokens=int(sum(num_tokens)),
        training_s=sum(line["timing_s/step"] for line in trained),
        evaluations=_first_and_last(evaluations),
    )


def write_model_card(run_folder: Path, folder: Path) -> None:
    """Writes README.md into `folder`, over one that is there. Raises ConfigError, DataError."""
    config = load_config(run_folder / "config.yaml")
    evaluations = run_folder / "evaluations.jsonl"
    figures = figures_of(
        read_lines(run_folder / "metrics.jsonl"),
        [line["metrics"] for line in read_lines(evaluations)] if evaluations.is_file() else [],
    )
    (folder / CARD_NAME).write_text(render_card(config, figures), encoding="utf-8")


def render_card(config: Config, figures: Figures) -> str:
    """The card: front matter, what was done, figures, settings, how to load the model."""
    base = shown_name(config.model)
    version, recipe = importlib.metadata.version("asyncrl"), shown_name(config.algorithm.type)
    front: dict[str, Any] = {
        "base_model": config.model if _is_on_the_hub(config.model) else None,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["asyncrl", "reinforcement-learning", recipe],
    }
    front = {key: value for key, value in front.items() if value is not None}
    return f"""---
{yaml.safe_dump(front, sort_keys=False)}---

# {config.run.name}

`{base}` after {figures.num_versions} policy versions of {recipe} with asyncrl {version}: asynchronous
reinforcement learning with staleness of at most {config.max_staleness} versions.

## Figures

{_table("figure", _figure_rows(figures))}
## Training

{_table("setting", _setting_rows(config))}
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/of/this/folder", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("path/of/this/folder")
```

```
vllm serve path/of/this/folder
```
"""


def shown_name(name: str) -> str:
    """A name as it is; of a folder or file elsewhere on the trainer's machine only its last part.

    Such a path may stand behind a word: `model:/home/me/judge` is `model:judge`.
    """
    word, _, path = name.partition(":")
    if path.startswith(PATH_BEGINNINGS):
        return f"{word}:{Path(path).name}"
    return Path(name).name if name.startswith(PATH_BEGINNINGS) else name


def _is_on_the_hub(model: str) -> bool:
    """A folder in the current one has the form of a name on the Hub, and comes before it."""
    return is_hub_name(model, with_owner=True) and not Path(model).is_dir()


def _figure_rows(figures: Figures) -> list[tuple[str, str]]:
    f = figures
    return [
        ("reward, first version", f"{f.first_reward:.4g}"),
        ("reward, last version", f"{f.last_reward:.4g}"),
        ("reward, best version", f"{f.best_reward:.4g} (version {f.best_version})"),
        (f"reward, mean of the last {min(NUM_LAST, f.num_versions)}", f"{f.mean_last_rewards:.4g}"),
        ("staleness of trained tokens, mean", f"{f.mean_staleness:.3g} versions"),
        ("staleness of trained tokens, max", f"{f.max_staleness} versions"),
        ("trained tokens", f"{f.num_trained_tokens}"),
        ("training time", f"{f.training_s:.0f} s"),
        *((f"{name}, first and last", f"{a:.4g}, {b:.4g}") for name, (a, b) in sorted(f.evaluations.items())),
    ]


def _setting_rows(config: Config) -> list[tuple[str, str]]:
    learner, rollout = config.learner, config.rollout
    return [
        ("base model", shown_name(config.model)),
        *_adapters(learner.lora),
        ("algorithm", ", ".join([shown_name(config.algorithm.type), *_changed_options(config.algorithm)])),
        ("data", ", ".join(_source(source) for source in config.data.train)),
        *(("supervised data", _source(source)) for source in config.data.supervised),
        ("reward", ", ".join(f"{shown_name(r.name)} (weight {r.weight:g})" for r in config.reward)),
        ("batch", f"{learner.prompts_per_batch} prompts x {rollout.group_size} completions a version"),
        ("optimizer steps a version", f"{learner.minibatches} mini-batches x {learner.epochs} epochs"),
        (
            "optimizer",
            f"{learner.optimizer}, lr {learner.lr:g}, {learner.warmup_versions} versions of warm-up",
        ),
        (
            "longest prompt, completion",
            f"{config.data.max_prompt_tokens}, {rollout.max_completion_tokens} tokens",
        ),
        ("sampling temperature", f"{rollout.temperature:g}"),
        ("max_staleness, over_age", f"{config.max_staleness}, {config.over_age}"),
        ("seed", f"{config.seed}"),
    ]


def _adapters(lora: LoraTable | None) -> Iterator[tuple[str, str]]:
    if lora is not None:
        where = ", ".join(lora.target_modules)
        yield "adapters", f"LoRA of rank {lora.rank}, alpha {lora.alpha} on {where}, merged"


def _source(source: SourceConfig) -> str:
    subset = f" ({source.subset})" if source.subset else ""
    return f"{shown_name(source.path)}{subset}"


def _changed_options(algorithm: AlgorithmConfig) -> Iterator[str]:
    """`key value` of each option that is not the recipe's own."""
    for key, value in own_options(algorithm).items():
        yield f"{key} {shown_name(value) if isinstance(value, str) else value}"


def _table(what: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = [f"| {what} | value |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows)]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _first_and_last(evaluations: Sequence[Metrics]) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for line in evaluations:
        for name, value in line.items():
            if name.startswith(EVALUATION_AREA):
                found[name] = found.get(name, (value, value))[0], value
    return found
