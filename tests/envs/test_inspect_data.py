"""What `asyncrl data` shows, and that it starts nothing and loads nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import processors

from asyncrl import cli
from asyncrl.config import DataConfig, SourceConfig
from asyncrl.envs.dataset import load_dataset
from asyncrl.envs.inspect_data import describe, lengths_in_words
from asyncrl.models.tiny import BOS_ID, build_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    build_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    chat = [{"prompt": [{"role": "user", "content": "ab" * n}], "answer": "x"} for n in (1, 2, 30)]
    verl = [{"prompt": "c\nd" + "e" * 40, "reward_model": {"ground_truth": "42"}}]
    for name, rows in (("chat", chat), ("verl", verl)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "long_only.py").write_text(
        "def keep(row):\n    return len(row['prompt'][0]['content']) > 2\n"
    )
    path = tmp_path / "config.yaml"
    path.write_text(
        f"model: {model}\n"
        "data:\n"
        "  max_prompt_tokens: 50\n"
        f"  train: [{{path: {tmp_path}/chat.jsonl, weight: 3, filter: 'long_only:keep'}}, {tmp_path}/verl.jsonl]\n"
    )
    return path


def run(*words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["asyncrl", "data", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_rows_counts_and_lengths_are_shown_for_each_source(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    # Mutations: counts over all sources; lengths of the dropped rows too (max 60); row numbers of the kept rows.
    monkeypatch.chdir(config.parent)
    monkeypatch.syspath_prepend(str(config.parent))
    assert run(str(config), "--rows", "1", monkeypatch=monkeypatch) == 0
    ids = build_tokenizer().encode("abab")
    long_ids = build_tokenizer().encode("c\nd" + "e" * 40)
    assert capsys.readouterr().out.replace(str(config.parent), "").splitlines() == [
        "data.train",
        "/chat.jsonl: 1 of 3 rows kept, 75.0% of the prompts",
        "  1 left out by its filter",
        "  1 longer than data.max_prompt_tokens 50",
        "  prompt tokens: min 4  mean 4.0  p50 4  p95 4  max 4",
        "  /chat.jsonl, line 2: 4 tokens, answer 'x'",
        "    | abab",
        f"    {' '.join(map(str, ids))}",
        "/verl.jsonl: 1 of 1 rows kept, 25.0% of the prompts",
        "  prompt tokens: min 43  mean 43.0  p50 43  p95 43  max 43",
        "  /verl.jsonl, line 1: 43 tokens, answer '42'",
        "    | c",
        "    | d" + "e" * 40,
        f"    {' '.join(map(str, long_ids[:32]))} ... 11 more",
        "all 2 sources: 2 of 4 rows kept",
        "  prompt tokens: min 4  mean 23.5  p50 4  p95 43  max 43",
    ]


def test_the_text_shown_is_what_the_tokens_say(tmp_path: Path):
    # Mutation: show the text that was tokenised -> neither the BOS that the tokenizer adds nor the unknown
    # character is seen; clean_up_tokenization_spaces=True -> "a."
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS_ID)]
    )
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a .\u00e9"}))
    data = DataConfig(train=(SourceConfig(path=str(path)),))
    shown = list(describe(load_dataset(data.train, data, 0, tokenizer), data, tokenizer, 1))
    assert shown[-2] == "    | <bos>a .<unk>"


def test_the_data_of_evaluations_is_shown_whether_or_not_a_run_would_evaluate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path
):
    # Mutation: refuse data.eval without eval.every in the configuration itself.
    for every in ((), ("eval.every=3",)):
        words = (f"model={model}", "data.eval=sort4", "data.max_rows=2", "--rows", "0", *every)
        assert run(*words, monkeypatch=monkeypatch) == 0
        titles = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
        assert titles == [
            "data.train",
            "rev4: 2 of 2 rows kept",
            "data.eval",
            "sort4: 2 of 2 rows kept",
        ]


def test_a_generator_that_has_more_rows_is_said_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path
):
    assert run(f"model={model}", "data.max_rows=2", "--rows", "0", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out.splitlines() == [
        "data.train",
        "rev4: 2 of 2 rows kept",
        "  only its first 2 rows, as data.max_rows says; it has more",
        "  prompt tokens: min 5  mean 5.0  p50 5  p95 5  max 5",
    ]


def test_percentiles_are_lengths_that_occur():
    # Mutation: numpy's default interpolates -> p95 95.05.
    lengths = np.arange(1, 101, dtype=np.int32)
    assert lengths_in_words(lengths) == "min 1  mean 50.5  p50 50  p95 95  max 100"


def test_a_model_that_is_not_here_is_refused_with_how_to_bring_it(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run(str(config), "model=nobody/none", monkeypatch=monkeypatch) == 2
    assert "python -m asyncrl.models nobody/none" in capsys.readouterr().err


def test_a_wrong_row_ends_with_exit_code_2_and_its_name(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert (
        run(
            str(config),
            f"data.train={config.parent}/verl.jsonl",
            "data.prompt_key=q",
            monkeypatch=monkeypatch,
        )
        == 2
    )
    assert "verl.jsonl, line 1, column 'q': missing" in capsys.readouterr().err


def test_the_command_loads_neither_torch_nor_vllm_even_for_parquet(config: Path, model: Path):
    # Mutation: AutoTokenizer, or a torch format of the data set -> torch is loaded.
    program = f"""
import sys
import datasets, datasets.config, pyarrow, pyarrow.parquet
datasets.config.HF_DATASETS_CACHE = {str(config.parent / "cache")!r}
pyarrow.parquet.write_table(pyarrow.table({{"prompt": ["ab"]}}), {str(config.parent / "p.parquet")!r})
sys.argv = ["asyncrl", "data", "model={model}", "data.train={config.parent}/p.parquet"]
from asyncrl import cli
try:
    cli.main()
except SystemExit as ended:
    print(ended.code, [name for name in ("torch", "vllm") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
    assert "1 of 1 rows kept" in done.stdout


def test_supervised_rows_are_shown_with_what_trains_of_them_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path
):
    # Mutations: lengths of all sources in each one's line; the first rows of all sources.
    lines = {"one": '{"prompt": "ab", "completion": "c\\nd"}\n{"text": ""}\n', "two": '{"text": "xyz"}\n'}
    for name, text in lines.items():
        (model.parent / f"{name}.jsonl").write_text(text)
    monkeypatch.chdir(model.parent)
    words = (f"model={model}", "data.max_rows=2", "--rows", "1", "algorithm.loss.ptx.coef=1")
    assert run(*words, "data.supervised=[one.jsonl, two.jsonl]", monkeypatch=monkeypatch) == 0
    _, _, shown = capsys.readouterr().out.partition("data.supervised\n")
    assert shown.splitlines() == [
        "one.jsonl: 1 of 2 rows kept",
        "  1 without a completion",
        "  prompt tokens: min 2  mean 2.0  p50 2  p95 2  max 2",
        "  tokens that train: min 4  mean 4.0  p50 4  p95 4  max 4",
        "  kept row 0 (from 0): 2 tokens, then 4 train",
        "    | ab",
        "    > c",
        "    > d<eos>",
        "two.jsonl: 1 of 1 rows kept",
        "  prompt tokens: min 1  mean 1.0  p50 1  p95 1  max 1",
        "  tokens that train: min 3  mean 3.0  p50 3  p95 3  max 3",
        "  kept row 0 (from 0): 1 tokens, then 3 train",
        "    | x",
        "    > yz<eos>",
    ]
