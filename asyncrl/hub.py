"""The Hugging Face Hub: how its names look, and its models by name. Torch-free."""

from __future__ import annotations

import json
import re
from pathlib import Path

HUB_TIMEOUT_S = 5
"""The Hub must answer a request for metadata by then."""
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
"""What is fetched: no pickled weights, no code."""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def is_hub_name(name: str, *, with_owner: bool = False) -> bool:
    """Whether `name` has the form of a name on the Hub; `with_owner`: of `owner/name`, which old models lack."""
    return _NAME.fullmatch(name) is not None and ("/" in name or not with_owner)


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
