"""The files beside a model's weights: tokenizer, chat template, generation config. Torch-free."""

from __future__ import annotations

import shutil
from pathlib import Path

COMPANION_SUFFIXES = {".json", ".txt", ".model", ".jinja"}
"""Of files that belong to the model as they came."""
CHAT_TEMPLATES = "additional_chat_templates"
"""The folder of chat templates besides the first, as transformers names it."""


def copy_companions(model_path: Path, folder: Path) -> None:
    """Copies them from a model's folder to `folder`, except those that are there already."""
    for file in sorted(model_path.iterdir()):
        is_companion = file.suffix in COMPANION_SUFFIXES and not file.name.endswith(".index.json")
        if is_companion and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
    if (model_path / CHAT_TEMPLATES).is_dir():
        shutil.copytree(model_path / CHAT_TEMPLATES, folder / CHAT_TEMPLATES, dirs_exist_ok=True)
