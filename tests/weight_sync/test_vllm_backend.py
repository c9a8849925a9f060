"""The backend's idea of what a snapshot must hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from asyncrl.errors import WeightSyncError
from asyncrl.weight_sync.manifest import lay_out

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


# Caught: names of the state dict (lm_head.weight twice), or a config whose tie flag is ignored.
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("config_class", [Qwen2Config, LlamaConfig])
def test_a_tied_head_is_expected_once_under_the_embeddings_name(config_class: type, tie: bool) -> None:
    from asyncrl.weight_sync.vllm_backend import expected_tensors

    expected = expected_tensors(config_class(vocab_size=70, tie_word_embeddings=tie, **SMALL))
    assert expected["model.embed_tokens.weight"] == (70, 32)
    assert ("lm_head.weight" in expected) is not tie
    assert expected["model.layers.0.mlp.down_proj.weight"] == (32, 48)


def test_the_snapshot_must_hold_exactly_the_expected_tensors() -> None:
    from asyncrl.weight_sync.vllm_backend import check_names

    manifest = lay_out([("a", (2, 3), "float32", 4), ("b", (4,), "float32", 4)], "i", 7)
    check_names(manifest, {"a": (2, 3), "b": (4,)})
    for expected, message in (
        ({"a": (2, 3), "b": (4,), "c": (1,)}, r"version 7 lacks c \(1 tensors missing\)"),
        ({"a": (2, 3)}, "has b, which the model does not know"),
        ({"a": (3, 2), "b": (4,)}, r"has a of shape \(2, 3\), the model's is \(3, 2\)"),
    ):
        with pytest.raises(WeightSyncError, match=message):
            check_names(manifest, expected)


def test_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "import asyncrl.weight_sync.vllm_plugin\n"
        "assert not {'torch', 'vllm', 'numpy', 'pydantic'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


# Caught: no early end (the atexit function runs); an error's exit code lost; a finalizer that runs later.
@pytest.mark.parametrize(("ending", "code", "is_early"), [("", 0, True), ("raise ValueError", 1, False)])
def test_a_process_that_is_done_leaves_at_once_behind_all_finalizers(
    tmp_path: Path, ending: str, code: int, is_early: bool
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import atexit, multiprocessing, os\n"
        "from multiprocessing.util import Finalize\n"
        "def target():\n"
        "    from asyncrl.weight_sync.vllm_plugin import leave_at_once\n"
        "    Finalize(None, leave_at_once, exitpriority=-1000)\n"
        "    Finalize(None, print, args=('finalizer',), exitpriority=0)\n"
        "    atexit.register(print, 'atexit')\n"
        f"    {ending or 'pass'}\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=target)\n"
        "    process.start()\n"
        "    process.join()\n"
        "    print(process.exitcode)\n"
    )
    ended = subprocess.run(
        [sys.executable, str(program)], timeout=60, check=True, stdout=subprocess.PIPE, text=True
    )
    assert ended.stdout.split() == ["finalizer", *([] if is_early else ["atexit"]), str(code)]


def test_the_plugin_registers_the_backend_however_often_it_is_called() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from asyncrl.weight_sync.vllm_plugin import BACKEND, register

    register()
    register()
    assert WeightTransferEngineFactory._registry[BACKEND]().__name__ == "SnapshotWeightTransfer"


def test_the_dtypes_of_a_manifest_are_torchs() -> None:
    from asyncrl.weight_sync.manifest import ITEMSIZES

    assert {name: getattr(torch, name).itemsize for name in ITEMSIZES} == ITEMSIZES
