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

import asyncio
import hashlib
import inspect
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from asyncrl.cache import cache_folder
from asyncrl.config import Config, load_config, validate_config
from asyncrl.config.recipes import Recipe
from asyncrl.envs.rows import shape_row
from asyncrl.errors import ConfigError, DataError

Rows = Iterable[Mapping[str, Any]]
RewardFunction = Callable[..., Any]
Reward = str | RewardFunction | Mapping[str, Any]
"""A name as in the config's `reward`, a function, or a table whose `name` is one of those."""


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
    """A run from a script. Nothing is started, and nothing heavy imported, before `train`."""

    def __init__(
        self,
        model: Any = None,
        *,
        reward_funcs: Reward | Sequence[Reward] | None = None,
        train_dataset: str | Path | Rows | None = None,
        eval_dataset: str | Path | Rows | None = None,
        supervised_dataset: str | Path | Rows | None = None,
        processing_class: Any = None,
        config: str | Path | Config | Mapping[str, Any] | None = None,
        **keys: Any,
    ) -> None:
        """Raises ConfigError for a wrong configuration, and DataError for rows that are no JSON.

        `model`: a name or folder, or a transformers model, whose tokenizer is `processing_class`.
        `reward_funcs`: one or several; names as in the config's `reward`, or functions that stand at the top of
        a file, called in asyncrl's, verl's or TRL's way by their parameters' names; with several, their sum,
        weighted where a table says so: `{"name": brevity, "weight": 0.1}`.
        `train_dataset`, `eval_dataset`, `supervised_dataset`: a path or name as in `data.train`, or rows (dicts, a
        `datasets.Dataset`); the last one is the data of `algorithm={"loss": {"ptx": {"coef": ...}}}`.
        `config`: a YAML file, a Config or a tree to start from. `keys`: top-level keys on top of it, tables as
        dicts: `Trainer(..., algorithm="ppo", max_staleness=1, learner={"lr": 1e-5})`. `algorithm` may hold functions
        where the config names one: `algorithm={"loss": {"policy": my_loss}}`.
        """
        tree = _tree_of(config)
        for key, value in keys.items():
            _put(tree, key, _named(value) if key == "algorithm" else value)
        self._words = _Words()
        datasets = {"train": train_dataset, "eval": eval_dataset, "supervised": supervised_dataset}
        for name, data in datasets.items():
            argument = f"{name}_dataset"
            if data is not None:
                path = _path_of(data, argument)
                _put(tree, "data", {name: path})
                if path != str(data):
                    self._words.files[path] = argument
            self._words.arguments[rf"\bdata\.{name}\b"] = argument
        if reward_funcs is not None:
            self._words.arguments[r"^reward(?=[:.])"] = "reward_funcs"
            several: Sequence[Any] = (
                reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
            )
            tree["reward"] = [_table_of(reward) for reward in several]
        if model is not None or processing_class is not None:
            tree["model"] = _folder_of(model, processing_class)
            if not isinstance(model, str | Path):
                self._words.files[tree["model"]] = "model"
        with self._words.spoken():
            self.config: Config = validate_config(tree)

    def train(self, *, resume: bool = False) -> TrainResult:
        """Runs to the end, from the initial model: each call is a run of its own. With `resume` the run that run.name
        names goes on from its newest checkpoint instead.

        Raises what `asyncrl check` refuses before anything starts, then the first cause of failure; Ctrl-C raises
        KeyboardInterrupt. Nothing that was started is left then.
        """
        from asyncrl.launch.run import run_until_done

        _check_caller()
        with self._words.spoken():
            path = run_until_done(self.config, resume=resume)
        lines = (path / "metrics.jsonl").read_text().splitlines()
        return TrainResult(path, [json.loads(line) for line in lines])


@dataclass(frozen=True, slots=True)
class _Words:
    """What a script calls the things that errors name by their keys in a configuration, or by files in the cache."""

    files: dict[str, str] = field(default_factory=dict)
    """Path -> the argument that was written there."""
    arguments: dict[str, str] = field(default_factory=dict)
    """Pattern of a key -> the argument that sets it."""

    @contextmanager
    def spoken(self) -> Iterator[None]:
        """Errors of what is asked for leave with the script's words."""
        try:
            yield
        except (ConfigError, DataError) as error:
            error.args = (self.of(str(error)),)
            raise

    def of(self, message: str) -> str:
        for file, name in self.files.items():
            message = re.sub(
                rf"{re.escape(file)}, line (\d+)",
                lambda found, name=name: f"{name}, row {int(found[1]) - 1} (from 0)",
                message,
            )
            message = message.replace(file, name)
        for key, name in self.arguments.items():
            message = re.sub(key, name, message, flags=re.MULTILINE)
            message = message.replace(f"{name}: {name} ", f"{name} ").replace(f"{name}=null", f"{name}=None")
        return re.sub(r"\bset (?!reward)(\w+)\.(\w+)", r'set \1={"\2": ...}', message)


def _check_caller() -> None:
    """Raises ConfigError where a run cannot be started from."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("Trainer.train() must be called from the main thread: signals end a run in order")
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("asyncrl.envs."):
            raise ConfigError(
                "this file starts a run while its reward or data is imported from it; put what starts the run under "
                '`if __name__ == "__main__":`'
            )
        frame = frame.f_back
    if _is_in_event_loop():
        raise ConfigError(
            "Trainer.train() is called inside a running event loop, such as a notebook's; put it into a .py file "
            "and run that, from a notebook with !python FILE"
        )


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _tree_of(config: str | Path | Config | Mapping[str, Any] | None) -> dict[str, Any]:
    """A tree whose top level may be written to."""
    if isinstance(config, str | Path):
        config = load_config(config)
    return config.model_dump(mode="json") if isinstance(config, Config) else dict(config or {})


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Tables are merged, everything else is replaced. Only `tree` itself is written to."""
    if isinstance(value, Mapping) and key != "algorithm":
        present = tree.get(key)
        tree[key] = dict(present) if isinstance(present, Mapping) else {}
        for inner, item in value.items():
            _put(tree[key], inner, item)
    else:
        tree[key] = value


def _named(value: Any) -> Any:
    """A tree with the names of the functions in it."""
    if isinstance(value, Mapping):
        return {key: _named(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_named(item) for item in value]
    if isinstance(value, Recipe):
        raise ConfigError(
            "algorithm is a Recipe, which other processes have to import; name it: algorithm='path/to/file.py:NAME'"
        )
    return _name_of(value, "algorithm") if callable(value) else value


def _table_of(reward: Reward) -> Any:
    """The reward as the config writes it: a name, or a table with one."""
    if isinstance(reward, Mapping):
        return {key: _name_of(value) if key == "name" else value for key, value in reward.items()}
    return _name_of(reward)


def _name_of(function: str | RewardFunction, argument: str = "reward_funcs") -> str:
    """`path/to/file.py:attr` of a function. Raises ConfigError for one that no other process can import."""
    if isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", type(function).__name__)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    # The module decides: a decorated function's code may stand in another file, and a name be given twice.
    if file is None or not file.endswith(".py") or getattr(module, name, None) is not function:
        raise ConfigError(
            f"{argument}: {name!r} is not a function at the top of a file, so the process that calls it cannot "
            "import it; define it with `def` in a .py file (not in a notebook, a class or another function)"
        )
    return f"{Path(file).resolve()}:{name}"


def _path_of(data: str | Path | Rows, what: str) -> str:
    """The path or name itself; rows become a JSONL file in the cache, named by the argument and by its content.

    Raises DataError.
    """
    if isinstance(data, str | Path):
        return str(data)
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise ConfigError(
            f"{what}: a {type(data).__name__} is neither a path nor rows; give dicts, or one split of a DatasetDict"
        )
    folder = cache_folder() / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.blake2b(digest_size=16)
    partial = folder / f"partial-{os.getpid()}.jsonl"
    try:
        with partial.open("wb") as file:
            for index, raw in enumerate(data):
                row = shape_row(raw, {}, f"{what}, row {index} (from 0)")
                line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
                digest.update(line)
                file.write(line)
        return str(partial.replace(folder / f"{what}-{digest.hexdigest()}.jsonl"))
    finally:
        partial.unlink(missing_ok=True)


def _folder_of(model: Any, tokenizer: Any) -> str:
    """The name or folder itself; a model and its tokenizer become a folder in the cache. Raises ConfigError."""
    if model is None or isinstance(model, str | Path):
        if tokenizer is not None:
            raise ConfigError(
                f"processing_class: a {type(tokenizer).__name__}, but a model that is only named brings its own; leave "
                "it out, or give the model as an object too: AutoModelForCausalLM.from_pretrained(...)"
            )
        return str(model)
    if tokenizer is None or not hasattr(model, "save_pretrained"):
        raise ConfigError(
            f"model: a {type(model).__name__} is neither a name nor a transformers model with its tokenizer; "
            "give processing_class=AutoTokenizer.from_pretrained(...) too"
        )
    return str(_save_model(model, tokenizer))


def _save_model(model: Any, tokenizer: Any) -> Path:
    """A folder that is named by its content: weights, config, tokenizer, chat template."""
    models = cache_folder() / "models"
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".object-", dir=models) as scratch:
        saved = Path(scratch) / "model"
        model.save_pretrained(saved)
        tokenizer.save_pretrained(saved)
        if not (saved / "config.json").is_file() or not any(saved.glob("*.safetensors")):
            raise ConfigError(
                f"model: a {type(model).__name__} saves no config.json with all weights (adapters are saved alone); "
                "merge them first: model.merge_and_unload()"
            )
        if not (saved / "tokenizer.json").is_file():
            raise ConfigError(
                f"processing_class: a {type(tokenizer).__name__} saves no tokenizer.json; give a fast tokenizer"
            )
        digest = blake3()
        for file in sorted(saved.rglob("*")):
            if file.is_file():
                digest.update(str(file.relative_to(saved)).encode()).update_mmap(file)
        folder = models / f"object-{digest.hexdigest(length=16)}"
        try:
            saved.rename(folder)
        except OSError:
            if not folder.is_dir():  # else the same content is there already
                raise
    return folder
