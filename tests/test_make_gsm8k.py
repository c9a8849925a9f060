"""scripts/make_gsm8k.py: verl's columns from GSM8K's lines."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType

import datasets.config
import pyarrow.parquet as pq
import pytest

from asyncrl.config import DataConfig, SourceConfig
from asyncrl.envs.dataset import load_rows
from asyncrl.envs.rows import answer_of

SCRIPT = Path(__file__).parent.parent / "scripts" / "make_gsm8k.py"
LINES = [
    {"question": "Ann has 2 pens and buys 3. How many?", "answer": "2+3=<<2+3=5>>5\n#### 5"},
    {"question": "How much is a car of $1,000 and one of $234?", "answer": "It is #### not yet\n#### 1,234"},
]


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_gsm8k", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_lines(path: Path, lines: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_two_rows_have_verls_columns_and_our_answers(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Mutations: the first marker instead of the last; commas kept ("1,234" is not what verl compares with).
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    target = tmp_path / "out" / "test.parquet"
    assert script.convert(write_lines(tmp_path / "test.jsonl", LINES), target) == 2
    assert pq.read_schema(target).names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    (rows,) = load_rows([SourceConfig(path=str(target))], DataConfig(), 0)
    assert rows[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": "How much is a car of $1,000 and one of $234? Let's think step by step and output the "
                'final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1234"},
        "extra_info": {
            "split": "test",
            "index": 1,
            "answer": "It is #### not yet\n#### 1,234",
            "question": "How much is a car of $1,000 and one of $234?",
        },
    }
    assert [answer_of(row, DataConfig()) for row in rows] == ["5", "1234"]


def test_a_line_ends_only_where_the_file_says(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Mutation: read_text().splitlines() -> the question is cut at the line separator, which JSON allows in a string.
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    source = tmp_path / "train.jsonl"
    line = {"question": "One\u2028two\x85three?", "answer": "#### 3"}
    source.write_text(json.dumps(line, ensure_ascii=False) + "\n", encoding="utf-8")
    assert script.convert(source, tmp_path / "train.parquet") == 1
    (rows,) = load_rows([SourceConfig(path=str(tmp_path / "train.parquet"))], DataConfig(), 0)
    assert rows[0]["extra_info"]["question"] == line["question"]


def test_an_answer_without_a_marker_is_named(script: ModuleType, tmp_path: Path):
    lines = write_lines(tmp_path / "train.jsonl", [LINES[0], {"question": "?", "answer": "no marker"}])
    with pytest.raises(ValueError, match=r"train, row 1 .*no marker"):
        script.convert(lines, tmp_path / "train.parquet")


@pytest.mark.skipif(
    "ASYNCRL_GSM8K" not in os.environ, reason="ASYNCRL_GSM8K names a folder with the JSONL files"
)
def test_the_whole_data_set_converts_and_every_answer_is_a_number(script: ModuleType, tmp_path: Path):
    folder = Path(os.environ["ASYNCRL_GSM8K"])
    for split, num_rows in (("train", 7473), ("test", 1319)):
        assert script.convert(folder / f"{split}.jsonl", tmp_path / f"{split}.parquet") == num_rows
        truths = pq.read_table(tmp_path / f"{split}.parquet")["reward_model"].to_pylist()
        assert all(truth["ground_truth"].lstrip("-").replace(".", "", 1).isdigit() for truth in truths)
