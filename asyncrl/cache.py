"""Where what is made once is kept: models, tokenised data, what a script handed over."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$ASYNCRL_CACHE, else ~/.cache/asyncrl."""
    return Path(os.environ.get("ASYNCRL_CACHE") or Path.home() / ".cache" / "asyncrl").resolve()
