"""From the config's `model` to a folder in Hugging Face's layout (config.json, safetensors, tokenizer.json).

`python -m asyncrl.models NAME` runs `resolve_model`, so that the launcher needs no torch. What is made
here is made once: under a file lock, in a temporary folder that is renamed when it is complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from asyncrl.cache import cache_folder
from asyncrl.errors import ConfigError
from asyncrl.hub import ask_hub, hub_folder, is_hub_name
from asyncrl.models import smollm2

LOCK_TIMEOUT_S = 900
"""Another process that makes the same model must be done by then."""

_PACKAGE = Path(__file__).parent.parent


def resolve_model(name: str, cache_dir: Path | None = None) -> Path:
    """The model's folder: made, fetched, or simply found. Raises ConfigError.

    `tiny` is made on the spot. A folder, `~` included, stands for itself. Anything else is a name on the Hub, looked up
    in the Hub's cache first; SmolLM2-135M-Instruct is also on the package index. `cache_dir` is where made
    models are kept: by default $ASYNCRL_CACHE, else ~/.cache/asyncrl.
    """
    if name == "tiny":
        return _make_once(_made_folder(name, cache_dir), _save_tiny)
    if (folder := model_folder(name)) is not None:
        return folder
    made = _made_folder(name, cache_dir)
    if made.is_dir():
        return made
    if (cached := hub_folder(name, local_files_only=True)) is not None:
        return cached
    return _fetch(name, made)


def model_is_ready(name: str, cache_dir: Path | None = None) -> bool:
    """Whether `resolve_model` would neither make nor download anything. Cheap, and torch-free.

    Raises ConfigError for a name that stands for nothing.
    """
    return (
        model_folder(name) is not None
        or _made_folder(name, cache_dir).is_dir()
        or hub_folder(name, local_files_only=True) is not None
    )


def absence(name: str, key: str = "model") -> str:
    """What is known of a model that is not here: whether the Hub has it, or that it was not verified.

    Raises ConfigError where the Hub answers that it has no such model. Fetches nothing.
    """
    if name in ("tiny", smollm2.HUB_NAME):  # made without the Hub
        return "not here yet"
    answer = ask_hub(name)
    if answer.has_model is None:
        return f"not here yet, and not verified to exist: the Hub could not be asked ({answer.detail})"
    if not answer.has_model:
        raise ConfigError(
            f"{key}: {name!r} is not here, and the Hub has no such model, or not for you (it answers "
            f"{answer.detail}); check the name, or log in with `hf auth login` where it is private"
        )
    return "not here yet; the Hub has it"


def model_folder(name: str, key: str = "model") -> Path | None:
    """The folder that a key of the config names; None for `tiny` and for names of the Hub.

    Raises ConfigError for what is none of them, and for a folder that holds no model.
    """
    folder = Path(os.path.expanduser(name))
    if name == "tiny" or not folder.is_dir():
        if not is_hub_name(name):
            raise ConfigError(f"{key}: {name!r} is not a folder; name one, or a model of the Hub")
        return None
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{key}: {name!r} is a folder without config.json, so it holds no model; name the one that does"
        )
    return folder.resolve()


def _fetch(name: str, made: Path) -> Path:
    _say(f"fetching model {name} from the Hugging Face Hub")
    try:
        folder = hub_folder(name, local_files_only=False)
        hub_problem = "the repository lacks config.json, tokenizer.json or safetensors weights"
        if folder is not None:
            return folder
    except Exception as error:  # the Hub's client raises its own, httpx's and OSErrors
        hub_problem = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    if name != smollm2.HUB_NAME:
        raise ConfigError(
            f"model {name!r}: not a folder, not in the Hub's cache, and the Hub failed with {hub_problem}; "
            "check the name and the network, or give a folder"
        )
    _say(f"the Hub failed ({hub_problem}); making it from the package {smollm2.PACKAGE}")
    try:
        return _make_once(made, smollm2.save_smollm2)
    except ConfigError as error:
        raise ConfigError(
            f"model {name!r}: the Hub failed with {hub_problem}, and the package index with {error}; "
            "check the network, or give a folder"
        ) from error


def _made_folder(name: str, cache_dir: Path | None) -> Path:
    """Where a made model lives; the name carries a hash of its recipe, so that a new recipe makes it anew."""
    recipe = b""
    if name == "tiny":
        sources = (_PACKAGE / "models" / "tiny.py", _PACKAGE / "envs" / "tasks.py")
        recipe = b"".join(path.read_bytes() for path in sources)
    elif name == smollm2.HUB_NAME:
        recipe = smollm2.WHEEL_SHA256.encode()
    digest = hashlib.sha256(recipe).hexdigest()[:12]
    root = cache_dir.resolve() if cache_dir else cache_folder()
    return root / "models" / f"{name.rpartition('/')[2]}-{digest}"


def _make_once(folder: Path, save: Callable[[Path], None]) -> Path:
    """`folder`, after `save` has filled it unless it is there already."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock_path = folder.with_name(f".{folder.name}.lock")
    try:
        with FileLock(lock_path, timeout=LOCK_TIMEOUT_S):
            if not folder.is_dir():
                unfinished = folder.with_name(f".{folder.name}.unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was killed
                save(unfinished)
                unfinished.rename(folder)
    except Timeout as error:
        raise ConfigError(
            f"{folder} is being made by another process for over {LOCK_TIMEOUT_S} s ({lock_path})"
        ) from error
    return folder


def _save_tiny(folder: Path) -> None:
    from asyncrl.models.tiny import save_tiny  # imports torch

    _say("making the model tiny (about 20 s, once)")
    save_tiny(folder)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
