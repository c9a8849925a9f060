"""The Hugging Face Hub: how its names look, and its models by name. Torch-free."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

HUB_TIMEOUT_S = 5
"""The Hub must answer a request for metadata by then."""
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
"""What is fetched: no pickled weights, no code."""

_REFUSALS = (401, 403, 404)
"""HTTP statuses of a name that stands for nothing, and of a model that one may not see: the Hub does not tell apart."""
_NAME = re.compile(r"(?!.*(--|\.\.|[-.]$|\.git$))(?=.{1,96}$)[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)


class HubAnswer(NamedTuple):
    """Whether the Hub has a model."""

    has_model: bool | None
    """None where it could not be asked; False also where it has the model for others only."""
    detail: str = ""
    """The HTTP status of a refusal; why it could not be asked."""


def is_hub_name(name: str, *, with_owner: bool = False) -> bool:
    """Whether `name` has the form of a name on the Hub; `with_owner`: of `owner/name`, which old models lack."""
    return _NAME.fullmatch(name) is not None and ("/" in name or not with_owner)


def ask_hub(name: str) -> HubAnswer:
    """One request for the model's metadata, for HUB_TIMEOUT_S at most. Fetches and raises nothing."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # the Hub's client raises its own, httpx's and OSErrors
        if isinstance(error, HfHubHTTPError) and error.response.status_code in _REFUSALS:
            return HubAnswer(False, str(error.response.status_code))
        return HubAnswer(None, f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
    return HubAnswer(True)


def hub_folder(name: str, *, local_files_only: bool) -> Path | None:
    """The model's snapshot folder when it is complete, else None. Raises what the Hub's client raises."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                name,
                allow_patterns=HUB_FILES,
                etag_timeout=HUB_TIMEOUT_S,
                local_files_only=local_files_only,
            )
        )
    except LocalEntryNotFoundError:
        if local_files_only:
            return None
        raise
    return folder if _is_complete(folder) else None


def _is_complete(folder: Path) -> bool:
    """Whether config, tokenizer and all shards are there: a download that was interrupted leaves some of them."""
    if not all((folder / file).is_file() for file in ("config.json", "tokenizer.json")):
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    return all(
        (folder / shard).is_file() for shard in set(json.loads(index.read_text())["weight_map"].values())
    )
