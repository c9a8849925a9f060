"""`asyncrl export`: the same tensors, in the dtype asked for, as transformers reads them; and what it refuses."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_model_card import write_run
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from asyncrl import cli, export
from asyncrl.errors import ConfigError
from asyncrl.export import StoredTensor, export_folder, find_tensors, write_safetensors

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def write_model(folder: Path, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> Path:
    """A Llama of two layers with every weight different from the next, and what belongs to it."""
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(3)
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"marker": 1}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (folder / "training_args.bin").write_bytes(b"\x80\x04pickle")
    return folder


def write_finished_run(folder: Path, **model: bool) -> Path:
    run = write_run(folder)
    write_model(run / "model", **model)
    return run


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Names, dtypes and bits."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_float32_run_is_exported_bit_by_bit_with_its_companions_and_card(tmp_path: Path, dtype: str | None):
    # Mutations: tensors in another order than their header says; copy what is pickled too; no card.
    run = write_finished_run(tmp_path / "run")
    out = tmp_path / "deep" / "out"
    export_folder(run, out, dtype)
    expected = stored(run / "model")
    assert_same(stored(out), expected)
    reloaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert_same(dict(reloaded.named_parameters()), expected)
    assert (out / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"
    assert {path.name for path in out.iterdir()} == {
        "README.md",
        "additional_chat_templates",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert "reward, best version | 0.9 (version 3)" in (out / "README.md").read_text()
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_bfloat16_is_the_rounded_float32_and_the_config_says_so(tmp_path: Path):
    # Mutations: cut the mantissa instead of rounding to even; leave float32 in config.json.
    model = write_model(tmp_path / "model")
    written = export_folder(model, tmp_path / "out", "bfloat16")
    assert {tensor.dtype for tensor in written} == {"BF16"}
    assert sum(tensor.num_bytes for tensor in written) == sum(2 * t.numel() for t in stored(model).values())
    assert_same(stored(tmp_path / "out"), {k: t.to(torch.bfloat16) for k, t in stored(model).items()})
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert reloaded.dtype == torch.bfloat16
    back = tmp_path / "back"
    export_folder(tmp_path / "out", back, "float32")
    assert AutoModelForCausalLM.from_pretrained(back, dtype="auto").dtype == torch.float32


def test_a_dtype_is_set_wherever_the_config_names_one(tmp_path: Path):
    # Mutations: only at the top -> text_config keeps float32, which vLLM would read; only where there is one -> the
    # config does not say what the weights are.
    model = write_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config |= {"torch_dtype": "float32", "text_config": {"dtype": "float32", "hidden_size": 16}}
    (model / "config.json").write_text(json.dumps(config))
    export_folder(model, tmp_path / "out", "bfloat16")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["dtype"], written["text_config"]["dtype"]) == ("bfloat16", "bfloat16")
    assert "torch_dtype" not in written
    del config["dtype"], config["torch_dtype"]
    (model / "config.json").write_text(json.dumps(config))
    export_folder(model, tmp_path / "unnamed", "bfloat16")
    assert json.loads((tmp_path / "unnamed" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("tied", "same", "kept"), [(True, True, False), (True, False, True), (False, True, True)]
)
def test_a_tied_head_is_stored_once_and_no_other_is_dropped(
    tmp_path: Path, tied: bool, same: bool, kept: bool
):
    # Mutations: store it twice; drop every head that equals the embedding; drop one that was trained apart.
    model = write_model(tmp_path / "model", tied=tied)
    tensors = stored(model)
    tensors[HEAD] = tensors[EMBEDDING].clone() if same else tensors[EMBEDDING] + 1
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    export_folder(model, tmp_path / "out")
    found = stored(tmp_path / "out")
    assert (HEAD in found) == kept
    assert_same(found, {name: tensor for name, tensor in tensors.items() if kept or name != HEAD})


def test_a_large_model_is_several_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Mutations: one file whatever its size; an index that names the wrong file; read only the first file back.
    monkeypatch.setattr(export, "MAX_SHARD_SIZE", "8KB")
    model = write_model(tmp_path / "model")
    export_folder(model, tmp_path / "out")
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, framework="pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored(model).values())
    expected = stored(model)
    assert_same(dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters()), expected)
    export_folder(tmp_path / "out", tmp_path / "again")
    assert_same(stored(tmp_path / "again"), expected)


@settings(max_examples=15, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1).filter(
            lambda name: name != "__metadata__"
        ),
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_what_is_written_is_what_safetensors_reads(tmp_path_factory, described):
    # Mutations: a header that is not padded; gaps between tensors; offsets in the given order while the data is
    # sorted; a scalar or an empty tensor that cannot be written.
    codes = {
        torch.float32: "F32",
        torch.bfloat16: "BF16",
        torch.int64: "I64",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
    tensors = {
        name: torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)
        for name, (dtype, shape) in described.items()
    }
    path = tmp_path_factory.mktemp("written") / "x.safetensors"
    stored_tensors = [StoredTensor(n, path, codes[t.dtype], tuple(t.shape)) for n, t in tensors.items()]
    write_safetensors(path, stored_tensors, lambda tensor: tensors[tensor.name])
    found = load_file(path)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    # The header is padded, so that the data begins at a multiple of 8.
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_whole_numbers_are_not_cast(tmp_path: Path):
    # Mutation: cast everything -> an index or a quantized weight becomes a float.
    model = write_model(tmp_path / "model")
    tensors = stored(model) | {
        "extra.ids": torch.arange(5),
        "extra.packed": torch.arange(5, dtype=torch.int8),
    }
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    export_folder(model, tmp_path / "out", "bfloat16")
    found = stored(tmp_path / "out")
    assert found["extra.ids"].dtype == torch.int64
    assert found["extra.packed"].dtype == torch.int8
    assert found[EMBEDDING].dtype == torch.bfloat16


def test_the_model_folder_of_a_run_gets_the_runs_card_and_a_lone_one_keeps_its_own(tmp_path: Path):
    # Mutations: a card only where the run itself is named; whatever has a config.yaml is a run.
    run = write_finished_run(tmp_path / "run")
    export_folder(run / "model", tmp_path / "out")
    assert "first-try" in (tmp_path / "out" / "README.md").read_text()
    lone = tmp_path / "elsewhere" / "model"
    shutil.copytree(tmp_path / "out", lone)
    (lone / "README.md").write_text("mine")
    for config in (lone, lone.parent):
        (config / "config.yaml").write_text("not_a_run: true\n")
    export_folder(lone, tmp_path / "again")
    assert (tmp_path / "again" / "README.md").read_text() == "mine"


def no_model(tmp_path: Path, *overrides: str) -> Path:
    return write_run(tmp_path / "run", *overrides)


def existing_out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return write_finished_run(tmp_path / "run")


def only_pickle(tmp_path: Path) -> Path:
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    return model


def broken(tmp_path: Path) -> Path:
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"not tensors")
    return model


REFUSALS: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "an OUT that exists": (existing_out, ["out exists already", "new folder"]),
    "a run that did not export": (
        lambda path: no_model(path, "learner.export=false"),
        ["has no model", "learner.export was false"],
    ),
    "a run that did not end": (
        lambda path: no_model(path, "learner.max_versions=9"),
        ["has no model", "did not end", "7 of 9 versions", "logs"],
    ),
    "another folder": (lambda path: path, ["neither a run directory", "config.yaml", "config.json"]),
    "pickled weights": (only_pickle, ["model.safetensors", "reads no other format"]),
    "a broken file": (broken, ["is not a safetensors file"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_exits_with_2_says_why_and_leaves_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    # Mutations: overwrite OUT; make OUT before the source is read.
    make, says = REFUSALS[case]
    source = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["asyncrl", "export", str(source), str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    for part in says:
        assert part in said
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unknown_dtype_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="--dtype: 'half' is not known; use bfloat16 or float32"):
        export_folder(write_model(tmp_path / "model"), tmp_path / "out", "half")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path):
    # Mutation: let OSError through -> a traceback, and exit code 1.
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/out cannot be made \(.*\); export to another folder"):
        export_folder(write_model(tmp_path / "model"), tmp_path / "file" / "out")


def test_an_export_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Mutation: write into OUT itself -> half a model stays.
    def fail(tensor: StoredTensor) -> torch.Tensor:
        raise OSError("disk full")

    model = write_model(tmp_path / "model")
    monkeypatch.setattr(export, "load_tensor", fail)
    with pytest.raises(OSError, match="disk full"):
        export_folder(model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_tensors_are_described_from_headers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Mutation: load every tensor to learn its shape.
    model = write_model(tmp_path / "model", tied=True)
    monkeypatch.setattr(export, "load_tensor", pytest.fail)
    found = {tensor.name: tensor for tensor in find_tensors(model)}
    assert HEAD not in found
    assert (found[EMBEDDING].dtype, found[EMBEDDING].shape, found[EMBEDDING].num_bytes) == (
        "F32",
        (31, 16),
        31 * 64,
    )
