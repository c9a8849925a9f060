"""Rows to prompts: sources, checks, templates. The tokenizer is the tiny one, with changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from asyncrl.config import DataConfig, SourceConfig
from asyncrl.envs.dataset import Dataset, examine, load_rows, load_tokenizer, tokenize
from asyncrl.envs.sources import Listed
from asyncrl.errors import ConfigError, DataError
from asyncrl.models.tiny import BOS_ID, build_tokenizer

CHAT = [{"role": "user", "content": "ab"}]


def config_of(path: str | Path, **keys: Any) -> DataConfig:
    return DataConfig(train=(SourceConfig(path=str(path)),), **keys)


def write_lines(tmp_path: Path, *lines: str) -> DataConfig:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return config_of(path)


def rows_of(data: DataConfig, seed: int = 0) -> list[dict[str, Any]]:
    """All kept rows of a config with one source."""
    (rows,) = load_rows(data.train, data, seed)
    return list(rows)


def tokenized(rows: list[dict[str, Any]], data: DataConfig, tokenizer: Any) -> Dataset:
    """Rows in memory as prompts."""
    return tokenize([examine(Listed(rows, "rows"), SourceConfig(path="rows"), data)], data, tokenizer)


def ids_of(text: str) -> list[int]:
    return build_tokenizer().encode(text)


def test_a_jsonl_file_is_read_row_by_row(tmp_path: Path) -> None:
    data = write_lines(tmp_path, '{"prompt": "ab", "answer": "x"}', "", '{"prompt": "cd", "n": 1.5}')
    assert rows_of(data) == [{"prompt": "ab", "answer": "x"}, {"prompt": "cd", "n": 1.5}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: a list, not an object"),
        ('{"question": "x"}', "line 2, column 'prompt': missing; the row has question; set data.prompt_key"),
        ('{"prompt": null}', "line 2, column 'prompt': null"),
        ('{"prompt": 3}', "line 2, column 'prompt': int"),
        ('{"prompt": ""}', "line 2, column 'prompt': an empty prompt"),
        ('{"prompt": []}', "line 2, column 'prompt': an empty list"),
        ('{"prompt": [{"role": "user"}]}', "message 0 must be an object with the strings role and content"),
        ('{"prompt": "x", "score": NaN}', "column 'score': nan is not a finite number"),
        ('{"prompt": "x", "big": 99999999999999999999}', "column 'big': an integer of more than 64 bits"),
        ('{"prompt": "\\ud800"}', "column 'prompt': a string with lone surrogates"),
    ],
)
def test_a_bad_line_is_named_with_its_column(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        rows_of(write_lines(tmp_path, '{"prompt": "ok"}', line))
    assert "rows.jsonl" in str(caught.value)


def test_bytes_that_are_no_utf8_are_named(tmp_path: Path) -> None:
    data = write_lines(tmp_path)
    Path(data.train[0].path).write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match="line 1: not UTF-8"):
        rows_of(data)


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl: cannot be read \(No such file"):
        rows_of(config_of(tmp_path / "nowhere.jsonl"))
    with pytest.raises(DataError, match="no rows"):
        rows_of(write_lines(tmp_path))


def test_an_unknown_task_is_refused_with_the_closest_one() -> None:
    with pytest.raises(ConfigError, match=r"nor a task \(did you mean 'sort4'\?\); use JSONL"):
        rows_of(config_of("sort"))


GENERATORS = """
def count(seed):
    while True:
        yield {"prompt": f"p{seed}"}
        seed += 1

def breaks(seed):
    yield {"prompt": "ok"}
    raise RuntimeError("disk on fire")

def foreign(seed):
    yield {"prompt": "x", "extra": {1, 2}}

def takes_nothing():
    return [{"prompt": "x"}]

def gives_nothing(seed):
    pass

def exits(seed):
    raise SystemExit(0)

def ends(seed):
    return [{"prompt": "x"}] * 3

def exiting_filter(row):
    raise SystemExit(0)
"""


@pytest.fixture
def generators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "row_generators.py").write_text(GENERATORS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "row_generators"


def test_a_generator_is_given_the_seed_and_cut_at_max_rows(generators: str) -> None:
    rows = rows_of(config_of(f"{generators}:count", max_rows=3), 7)
    assert rows == [{"prompt": "p7"}, {"prompt": "p8"}, {"prompt": "p9"}]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("breaks", "the generator failed at row 1 with RuntimeError: disk on fire"),
        ("foreign", "row 0 .*column 'extra': a set is not a JSON value"),
        ("takes_nothing", "the generator failed at row 0 with TypeError: .*takes 0 positional arguments"),
        ("gives_nothing", "the generator failed at row 0 with TypeError: 'NoneType' object is not iterable"),
        ("exits", "the generator failed at row 0 with SystemExit: 0"),
    ],
)
def test_a_generators_faults_are_named(generators: str, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows_of(config_of(f"{generators}:{name}"))


def test_a_filter_that_exits_is_named(generators: str) -> None:
    # Catches: `except Exception` alone -> the command ends with exit code 0 and no word.
    source = SourceConfig(path=f"{generators}:ends", filter=f"{generators}:exiting_filter")
    with pytest.raises(DataError, match=r"row 0 .*the filter .*exiting_filter' failed with SystemExit: 0"):
        load_rows([source], DataConfig(), 0)


@pytest.mark.parametrize(("max_rows", "is_cut"), [(2, True), (3, False), (4, False)])
def test_rows_know_whether_a_generator_had_more(generators: str, max_rows: int, is_cut: bool) -> None:
    # Catches: >= in place of > (cut at 3 too); taking no row beyond max_rows.
    data = config_of(f"{generators}:ends", max_rows=max_rows)
    (rows,) = load_rows(data.train, data, 0)
    assert (len(rows), rows.is_cut) == (min(3, max_rows), is_cut)


def token_lists(rows: list[dict[str, Any]], data: DataConfig, tokenizer: Any) -> list[list[int]]:
    return [kept.token_ids.tolist() for kept in tokenized(rows, data, tokenizer)]


def test_long_prompts_are_dropped_counted_and_the_rest_keep_their_index() -> None:
    # Catches: `<=` -> `<`; row_index counted over the kept rows.
    rows = [{"prompt": "a" * length} for length in (5, 3, 9, 4)]
    dataset = tokenized(rows, DataConfig(max_prompt_tokens=4), build_tokenizer())
    assert (len(dataset), dataset.num_rows, dataset.num_too_long) == (2, 4, 2)
    assert [kept.row_index for kept in dataset] == [1, 3]
    assert dataset[1].row == rows[3]
    assert dataset[1].text == "aaaa"
    assert dataset[1].token_ids.tolist() == ids_of("aaaa")
    assert dataset[1].token_ids.dtype == np.int32
    assert dataset.prompt_lengths.tolist() == [3, 4]


def test_nothing_left_after_the_length_filter_is_an_error() -> None:
    with pytest.raises(DataError, match=r"all 2 prompts are longer .*4 .*the shortest has 5"):
        tokenized(
            [{"prompt": "a" * 6}, {"prompt": "a" * 5}], DataConfig(max_prompt_tokens=4), build_tokenizer()
        )


def test_messages_go_through_the_template_with_the_generation_prompt() -> None:
    # Catches: add_generation_prompt=False.
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    rows: list[dict[str, Any]] = [{"prompt": CHAT}, {"prompt": "cd"}]
    assert token_lists(rows, DataConfig(), tokenizer) == [ids_of("u:aba:"), ids_of("cd")]
    as_chat = DataConfig(as_chat=True, system_prompt="S")
    assert token_lists(rows, as_chat, tokenizer) == [ids_of("s:Su:aba:"), ids_of("s:Su:cda:")]
    own_system = [{"prompt": [{"role": "system", "content": "T"}, *CHAT]}]
    assert token_lists(own_system, as_chat, tokenizer) == [ids_of("s:Tu:aba:")]


def test_a_system_prompt_that_would_go_nowhere_is_refused() -> None:
    # Catches: a string prompt taken as it is, the system prompt ignored without a word.
    data = DataConfig(system_prompt="Be brief.")
    with pytest.raises(
        DataError, match=r"row 0 .*data\.system_prompt 'Be brief\.' .*set data\.as_chat: true"
    ):
        tokenized([{"prompt": "ab"}], data, build_tokenizer())


def test_a_template_and_a_tokenizer_that_both_add_bos_give_exactly_one() -> None:
    # Catches: encoding the rendered template with add_special_tokens=True.
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS_ID)]
    )
    tokenizer.chat_template = "<bos>{% for m in messages %}{{ m['content'] }}{% endfor %}"
    rows: list[dict[str, Any]] = [{"prompt": CHAT}, {"prompt": "ab"}]
    assert token_lists(rows, DataConfig(), tokenizer) == [[BOS_ID, *ids_of("ab")]] * 2


def test_without_a_template_messages_are_refused_and_strings_work() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    tokenizer.name_or_path = "some/base-model"
    with pytest.raises(
        DataError, match=r"row 1 .*'some/base-model' has no chat template.*chat_template.jinja"
    ):
        tokenized([{"prompt": "ab"}, {"prompt": CHAT}], DataConfig(), tokenizer)
    assert token_lists([{"prompt": "ab"}], DataConfig(), tokenizer) == [ids_of("ab")]


def test_a_template_that_refuses_a_row_names_it() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}x"
    )
    rows: list[dict[str, Any]] = [{"prompt": CHAT}, {"prompt": [{"role": "tool", "content": "x"}]}]
    with pytest.raises(DataError, match=r"row 1 .*refuses the messages: .*no tools"):
        tokenized(rows, DataConfig(), tokenizer)


def test_a_folder_without_a_fast_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_load_tokenizer_reads_the_same_ids_as_transformers_auto_class(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    build_tokenizer().save_pretrained(tmp_path)
    ours, auto = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode("ab12=") == auto.encode("ab12=") == ids_of("ab12=")
    assert ours.chat_template == auto.chat_template is not None


def test_loading_and_tokenizing_a_chat_never_imports_torch(tmp_path: Path) -> None:
    # Catches: AutoTokenizer in place of PreTrainedTokenizerFast.
    build_tokenizer().save_pretrained(tmp_path)
    program = f"""
import json, sys
from asyncrl.config import DataConfig
from asyncrl.envs.dataset import load_dataset, load_tokenizer
from asyncrl.envs import env, rewards, reward_pool
tokenizer = load_tokenizer({str(tmp_path)!r})
data = DataConfig(train="first_word", max_rows=2)
dataset = load_dataset(data.train, data, 0, tokenizer)
tokenizer.decode(dataset[0].token_ids.tolist(), skip_special_tokens=True)
print(json.dumps([len(dataset), "torch" in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [2, False]
