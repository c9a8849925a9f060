"""Every kind of source gives the same rows; none is read whole; what cannot be read is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import datasets.config
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.config import DataConfig, SourceConfig
from asyncrl.envs.dataset import Dataset, SourceRows, load_dataset, load_rows
from asyncrl.errors import ConfigError, DataError
from asyncrl.models.tiny import build_tokenizer


@pytest.fixture(autouse=True)
def library_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def verl_row(index: int, answer: str = "2") -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is {index} + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": index, "answer": f"#### {answer}", "question": "?"},
    }


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return str(path)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(path: str | Path, **keys: Any) -> SourceRows:
    (rows,) = load_rows([SourceConfig(path=str(path), **keys)], DataConfig(), 0)
    return rows


def prompts_of(*sources: SourceConfig, **keys: Any) -> Dataset:
    return load_dataset(sources, DataConfig(**keys), 0, build_tokenizer())


def test_verls_parquet_works_as_it_is(tmp_path: Path):
    # Catches: numpy or Arrow values left in a row (they would not travel), columns lost on the way.
    rows = [verl_row(0), verl_row(1, "17")]
    path = write_parquet(tmp_path / "train.parquet", rows)
    kept = rows_of(path)
    assert list(kept) == rows
    assert type(kept[1]["extra_info"]["index"]) is int
    assert kept.where(1) == f"{path}, row 1 (from 0)"
    # The tiny model's template joins the messages' contents.
    assert [prompt.text for prompt in prompts_of(SourceConfig(path=path))] == [
        "What is 0 + 1?",
        "What is 1 + 1?",
    ]


def test_jsonl_parquet_saved_folder_and_clone_give_the_same_rows(tmp_path: Path):
    rows = [verl_row(index) for index in range(5)]
    clone = tmp_path / "clone"
    clone.mkdir()
    write_jsonl(clone / "train.jsonl", rows)
    loaded = datasets.Dataset.from_list(rows)
    loaded.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": loaded.select([0]), "test": loaded}).save_to_disk(str(tmp_path / "splits"))
    assert list(rows_of(write_jsonl(tmp_path / "rows.jsonl", rows))) == rows
    assert list(rows_of(write_parquet(tmp_path / "rows.parquet", rows))) == rows
    assert list(rows_of(tmp_path / "saved")) == rows
    assert list(rows_of(tmp_path / "splits", split="test")) == rows
    assert list(rows_of(tmp_path / "splits")) == rows[:1]
    assert list(rows_of(clone)) == rows


def test_a_pattern_is_all_its_files_in_the_order_of_their_names_whatever_their_columns(tmp_path: Path):
    # Catches: glob's own order; one schema for all files (a column of the second would be lost or refused).
    write_parquet(tmp_path / "part-1.parquet", [{"prompt": "c", "n": "text"}])
    write_parquet(tmp_path / "part-0.parquet", [{"prompt": "a"}, {"prompt": "b"}])
    write_jsonl(tmp_path / "part-2.jsonl", [{"prompt": "d"}])
    rows = rows_of(tmp_path / "part-*")
    assert [row["prompt"] for row in rows] == ["a", "b", "c", "d"]
    assert rows[2] == {"prompt": "c", "n": "text"}
    assert rows.where(2).endswith("part-1.parquet, row 0 (from 0)")
    assert rows.where(3).endswith("part-2.jsonl, line 1")
    with pytest.raises(DataError, match=r"none-\*\.jsonl: the pattern matches no file"):
        rows_of(tmp_path / "none-*.jsonl")


def test_a_parquet_file_that_changed_is_read_anew(tmp_path: Path):
    path = tmp_path / "rows.parquet"
    write_parquet(path, [{"prompt": "old"}])
    assert rows_of(path)[0] == {"prompt": "old"}
    write_parquet(path, [{"prompt": "new"}])
    os.utime(path, ns=(1, 1))
    assert rows_of(path)[0] == {"prompt": "new"}


def test_messages_lose_the_keys_that_arrow_filled_in(tmp_path: Path):
    # Arrow gives both messages the key `name`. Catches: passing name=None on to the template.
    rows = [{"prompt": [{"role": "user", "content": "a", "name": "N"}, {"role": "user", "content": "b"}]}]
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ 'name' in m }} {% endfor %}"
    data = DataConfig()
    source = SourceConfig(path=write_parquet(tmp_path / "rows.parquet", rows))
    assert load_dataset([source], data, 0, tokenizer)[0].text == "True False "


def test_trls_conversational_and_standard_prompts_work_as_they_are(tmp_path: Path):
    chat = write_jsonl(tmp_path / "chat.jsonl", [{"prompt": [{"role": "user", "content": "ab"}]}])
    text = write_jsonl(tmp_path / "text.jsonl", [{"prompt": "cd", "solution": "x"}])
    prompts = prompts_of(SourceConfig(path=chat), SourceConfig(path=text))
    assert [prompt.text for prompt in prompts] == ["ab", "cd"]
    assert (prompts.source, prompts.sizes) == (f"{chat}, {text}", [1, 1])


def test_columns_and_filter_shape_a_source_and_the_filtered_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Catches: the filter before the columns are mapped; row_index counted over the kept rows; the null prompt of a
    # filtered row refused.
    (tmp_path / "my_filters.py").write_text(
        "def easy(row):\n    return row['prompt'] is not None and row['level'] < 3\n"
        "def breaks(row):\n    return row['nothing']\n"
        "def none(row):\n    return False\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [
        {"q": text, "info": {"level": level}} for text, level in (("a", 5), (None, 1), ("b", 1), ("cccc", 2))
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    columns = {"prompt": "q", "level": "info.level"}
    source = SourceConfig(path=path, columns=columns, filter="my_filters:easy")
    prompts = prompts_of(source, max_prompt_tokens=3)
    assert [(p.row["prompt"], p.row["level"], p.row_index) for p in prompts] == [("b", 1, 2)]
    (counts,) = prompts.counts
    assert (counts.num_rows, counts.num_filtered, counts.num_too_long, counts.num_kept) == (4, 2, 1, 1)
    assert (prompts.num_rows, prompts.num_filtered, prompts.num_too_long) == (4, 2, 1)
    with pytest.raises(
        DataError, match=r"line 1: the filter 'my_filters:breaks' failed with KeyError: 'nothing'"
    ):
        rows_of(path, columns=columns, filter="my_filters:breaks")
    with pytest.raises(DataError, match="the filter 'my_filters:none' leaves none of 4 rows"):
        rows_of(path, columns=columns, filter="my_filters:none")
    with pytest.raises(ConfigError, match=r"data\.train: filter 'my_filters:hard'.* has no 'hard'"):
        rows_of(path, columns=columns, filter="my_filters:hard")


def test_a_missing_column_and_a_null_of_a_parquet_file_are_named(tmp_path: Path):
    path = write_parquet(tmp_path / "rows.parquet", [{"prompt": "a", "x": 1.0}, {"prompt": None, "x": 1.0}])
    with pytest.raises(DataError, match=r"rows\.parquet, row 1 \(from 0\), column 'prompt': null"):
        rows_of(path)
    with pytest.raises(
        DataError, match=r"rows\.parquet, row 0 .*column 'question': missing; the row has prompt, x"
    ):
        rows_of(path, columns={"prompt": "question"})


def test_every_source_must_keep_a_prompt(tmp_path: Path):
    # Catches: the check over all sources together -> the second is silently never drawn.
    short = SourceConfig(path=write_jsonl(tmp_path / "short.jsonl", [{"prompt": "a"}]))
    long = SourceConfig(path=write_jsonl(tmp_path / "long.jsonl", [{"prompt": "a" * 9}]))
    with pytest.raises(DataError, match=r"long\.jsonl: all 1 prompts are longer .*the shortest has 9"):
        prompts_of(short, long, max_prompt_tokens=3)


def test_weights_are_checked_with_the_rows(tmp_path: Path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    sources = [SourceConfig(path=path, weight=weight) for weight in (0.1234567, 1.0)]
    with pytest.raises(ConfigError, match=r"weight: .*use rounder numbers"):
        load_rows(sources, DataConfig(), 0)


def test_files_that_are_no_parquet_or_not_there_are_named(tmp_path: Path):
    (tmp_path / "bad.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=r"bad\.parquet: not a parquet file that can be read: ArrowInvalid"):
        rows_of(tmp_path / "bad.parquet")
    with pytest.raises(DataError, match=r"nowhere\.parquet: cannot be read \(No such file.*check data\.eval"):
        load_rows([SourceConfig(path=str(tmp_path / "nowhere.parquet"))], DataConfig(), 0, "data.eval")


def test_a_saved_folder_without_the_split_says_which_it_has(tmp_path: Path):
    datasets.DatasetDict({"test": datasets.Dataset.from_list([{"prompt": "a"}])}).save_to_disk(
        str(tmp_path / "d")
    )
    with pytest.raises(ConfigError, match=r"data\.train: .* has no split 'train'; it has test"):
        rows_of(tmp_path / "d")


def test_a_data_set_of_the_hub_that_is_out_of_reach_says_so():
    # tests/conftest.py sets HF_HUB_OFFLINE.
    with pytest.raises(
        ConfigError, match=r"data\.train: 'nobody/none' .*subset main, split test.*OfflineMode.*network"
    ):
        rows_of("nobody/none", subset="main", split="test")


def test_a_jsonl_file_that_was_replaced_is_read_as_it_was(tmp_path: Path):
    # Catches: opening the file by its name at every read -> another row, or a broken line.
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"prompt": "first"}, {"prompt": "second"}])
    rows = rows_of(path)
    write_jsonl(tmp_path / "new.jsonl", [{"prompt": "x"}])
    (tmp_path / "new.jsonl").rename(path)
    assert rows[1] == {"prompt": "second"}


def test_a_jsonl_file_that_was_written_over_is_refused_and_one_that_grew_is_not(tmp_path: Path):
    # Catches: no checksum -> the tokens of one prompt with the answer of another, without a word.
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"prompt": "ab", "answer": "1"}, {"prompt": "cd", "answer": "2"}])
    rows = rows_of(path)
    with path.open("a") as file:
        file.write('{"prompt": "ef", "answer": "3"}\n')
    assert rows[1] == {"prompt": "cd", "answer": "2"}
    write_jsonl(path, [{"prompt": "ab", "answer": "1"}, {"prompt": "xy", "answer": "9"}])
    assert rows[0] == {"prompt": "ab", "answer": "1"}
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: changed since the file was looked at"):
        rows[1]


def test_a_parquet_file_without_rows_is_called_so(tmp_path: Path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(DataError, match=r"rows\.parquet: no rows"):
        rows_of(path)


def test_a_folder_that_is_no_data_set_is_named_without_talk_of_the_network(tmp_path: Path):
    # Mutation: load it as a name of the Hub.
    (tmp_path / "nothing").mkdir()
    with pytest.raises(
        DataError, match=r"data\.train: the folder '.*nothing' .*any data files; check it"
    ) as caught:
        rows_of(tmp_path / "nothing")
    assert "network" not in str(caught.value)


def test_a_file_of_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # YAML and `key=~/...` on a command line are not the shell's to expand.
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "ab"}])
    write_jsonl(tmp_path / "more.json", [{"prompt": "cd"}])
    assert rows_of("~/rows.jsonl")[0] == {"prompt": "ab"}
    assert [row["prompt"] for row in rows_of("~/*.json*")] == ["cd", "ab"]


def test_a_json_file_that_is_not_there_is_not_looked_for_on_the_hub():
    with pytest.raises(DataError, match=r"data/none\.json: cannot be read \(No such file"):
        rows_of("data/none.json")


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path):
    # Mutation: go by the name alone -> open() waits for a writer that never comes.
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ConfigError, match=r"pipe\.jsonl' is neither a file nor a folder"):
        rows_of(tmp_path / "pipe.jsonl")


@pytest.mark.parametrize("asked", [{"split": "test"}, {"subset": "main"}])
def test_a_file_or_task_that_is_asked_for_a_part_is_refused(asked: dict[str, str], tmp_path: Path):
    # Mutation: leave a call of _whole out -> all rows are taken, whatever the split says.
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "ab"}])
    datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(str(tmp_path / "saved"))
    for name in (
        path,
        write_parquet(tmp_path / "rows.parquet", [{"prompt": "a"}]),
        "rev4",
        tmp_path / "saved",
    ):
        with pytest.raises(ConfigError, match=rf"{next(iter(asked))} '.*' of '.*' means nothing"):
            rows_of(name, **asked)


def test_a_large_parquet_file_is_never_read_whole(tmp_path: Path):
    # 40,000 rows of 2 kB: 80 MB of text. What Arrow has allocated at its peak, through conversion, scan and reads,
    # is a few row groups of 2 MB. Mutation: keep_in_memory=True in from_parquet -> over 80 MB; rows that are kept
    # as a list -> the process grows by as much.
    table = pa.table({"prompt": ["ab"] * 1000, "filler": ["x" * 2000] * 1000})
    path = tmp_path / "large.parquet"
    with pq.ParquetWriter(path, table.schema, compression="none", use_dictionary=False) as writer:
        for _ in range(40):
            writer.write_table(table)
    program = f"""
import json, sys
import datasets, datasets.config, psutil, pyarrow
from asyncrl.config import DataConfig, SourceConfig
from asyncrl.envs.dataset import load_rows
datasets.config.HF_DATASETS_CACHE = {str(tmp_path / "cache")!r}
def private_bytes():
    process = psutil.Process()
    mapped = [m for m in process.memory_maps() if ".arrow" in m.path]
    return process.memory_full_info().uss - sum(m.private_dirty + m.private_clean for m in mapped)
before = private_bytes()
(rows,) = load_rows([SourceConfig(path={str(path)!r})], DataConfig(), 0)
assert rows[39_999]["prompt"] == "ab"
arrow_bytes = pyarrow.default_memory_pool().max_memory()
print(json.dumps([len(rows), arrow_bytes, private_bytes() - before, "torch" in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    num_rows, arrow_bytes, grown_bytes, has_torch = json.loads(done.stdout)
    assert path.stat().st_size > 80e6
    assert (num_rows, has_torch) == (40_000, False)
    assert arrow_bytes < 40e6
    assert grown_bytes < 60e6
