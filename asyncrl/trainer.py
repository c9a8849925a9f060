"""`asyncrl.Trainer`: a run from a script, with the model, data and rewards that the script has at hand.

    import asyncrl

    def brevity(completion, row):
        return -len(completion) / 100

    if __name__ == "__main__":
        asyncrl.Trainer("tiny", reward_funcs=brevity, train_dataset="rev4").train()

It makes a configuration and runs it as `asyncrl train` does: the same processes, the same run directory. What
is an object here has to reach other processes, so it becomes what they can read: a model a folder, rows a
JSONL file, a function the file and name it is imported from. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.cache import cache_folder
from asyncrl.config import Config, load_config, validate_config
from asyncrl.errors import ConfigError
from asyncrl.run_directory import default_run_name

Rows = Iterable[Mapping[str, Any]]
RewardFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a finished run has left."""

    run_directory: Path
    metrics: list[dict[str, float]]
    """One a version: the lines of metrics.jsonl."""

    @property
    def model_path(self) -> Path:
        """The last version in Hugging Face format (unless learner.export is false)."""
        return self.run_directory / "model"


class Trainer:
    """One run. Nothing is started, and nothing heavy imported, before `train`."""

    def __init__(
        self,
        model: Any = None,
        *,
        reward_funcs: str | RewardFunction | list[str | RewardFunction] | None = None,
        train_dataset: str | Rows | None = None,
        eval_dataset: str | Rows | None = None,
        processing_class: Any = None,
        config: str | Path | Mapping[str, Any] | None = None,
        **keys: Any,
    ) -> None:
        """Raises ConfigError for what cannot run, as `asyncrl check` would.

        `model`: a name or folder, or a transformers model, whose tokenizer is `processing_class`.
        `reward_funcs`: one or several; names as in the config's `reward`, or functions that stand at the top of
        a file, called in asyncrl's, verl's or TRL's way by their parameters' names; with several, their sum.
        `train_dataset`, `eval_dataset`: a path or name as in `data.train`, or rows (dicts, a `datasets.Dataset`).
        `config`: a YAML file or a tree to start from. `keys`: top-level keys on top of it, tables as dicts:
        `Trainer(..., algorithm="grpo", max_staleness=1, learner={"lr": 1e-5})`.
        """
        tree = _tree_of(config)
        for key, value in keys.items():
            _put(tree, key, value)
        data = {
            name: rows
            for name, rows in (("train", train_dataset), ("eval", eval_dataset))
            if rows is not None
        }
        for name, rows in data.items():
            _put(tree, "data", {name: rows if isinstance(rows, str) else _save_rows(rows, f"{name}_dataset")})
        if reward_funcs is not None:
            several = isinstance(reward_funcs, list | tuple)
            tree["reward"] = [
                _name_of(function) for function in (reward_funcs if several else [reward_funcs])
            ]
        if model is not None:
            tree["model"] = (
                str(model) if isinstance(model, str | Path) else _save_model(model, processing_class)
            )
        if not tree.get("run", {}).get("name"):
            _put(tree, "run", {"name": default_run_name()})
        self.config: Config = validate_config(tree)

    def train(self) -> TrainResult:
        """Runs to the end. Raises the first cause of failure; Ctrl-C raises KeyboardInterrupt after the end."""
        from asyncrl.launch.run import run_until_done

        _check_caller()
        path = run_until_done(self.config)
        lines = (path / "metrics.jsonl").read_text().splitlines()
        return TrainResult(path, [json.loads(line) for line in lines])


def _check_caller() -> None:
    """Raises ConfigError where a run cannot be started from."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("Trainer.train() must be called from the main thread: signals end a run in order")
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("asyncrl.envs."):
            raise ConfigError(
                "this file starts a run while its reward is imported from it; put what starts the run under "
                '`if __name__ == "__main__":`'
            )
        frame = frame.f_back


def _tree_of(config: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, str | Path):
        return load_config(config).model_dump(mode="json")
    return json.loads(json.dumps(config))


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Tables are merged, everything else is replaced."""
    if isinstance(value, Mapping) and key != "algorithm":
        table = dict(tree.get(key) or {})
        for inner, item in value.items():
            _put(table, inner, item)
        tree[key] = table
    else:
        tree[key] = value


def _name_of(function: str | RewardFunction) -> str:
    """`path/to/file.py:attr` of a function. Raises ConfigError for one that no other process can import."""
    if isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", type(function).__name__)
    file = inspect.getsourcefile(function) if inspect.isfunction(function) else None
    if file is None or not os.path.isfile(file) or not name.isidentifier():
        raise ConfigError(
            f"reward_funcs: {name!r} is not a function at the top of a file, so the reward's own process cannot "
            "import it; define it with `def` in a .py file (not in a notebook, a class or another function)"
        )
    return f"{Path(file).resolve()}:{name}"


def _save_rows(rows: Rows, what: str) -> str:
    """A JSONL file in the cache, named by its content. Raises ConfigError for rows that are no JSON."""
    folder = cache_folder() / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.blake2b(digest_size=16)
    partial = folder / f"partial-{os.getpid()}.jsonl"
    try:
        with partial.open("wb") as file:
            for index, row in enumerate(rows):
                line = _as_line(row, f"{what}, row {index} (from 0)")
                digest.update(line)
                file.write(line)
        return str(partial.replace(folder / f"{digest.hexdigest()}.jsonl"))
    finally:
        partial.unlink(missing_ok=True)


def _as_line(row: Mapping[str, Any], where: str) -> bytes:
    try:
        return json.dumps(dict(row), ensure_ascii=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}; rows are dicts of JSON values") from error


def _save_model(model: Any, tokenizer: Any) -> str:
    """A folder in the cache, named by the weights' content. Raises ConfigError."""
    if tokenizer is None or not hasattr(model, "save_pretrained"):
        raise ConfigError(
            f"model: a {type(model).__name__} is neither a name nor a transformers model with its tokenizer; "
            "give processing_class=AutoTokenizer.from_pretrained(...) too"
        )
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    folder = cache_folder() / "models" / f"object-{digest.hexdigest()}"
    if not (folder / "tokenizer.json").is_file():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return str(folder)
