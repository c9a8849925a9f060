"""data.supervised: which tokens of a row are its prompt, which train, what is left out. The tokenizer is the tiny
one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from asyncrl.config import Config, load_config
from asyncrl.envs.supervised import SupervisedDataset, load_supervised, max_row_tokens
from asyncrl.errors import DataError
from asyncrl.models.tiny import BOS_ID, build_tokenizer

SPOKEN = (
    "{% for m in messages %}<bos>{{ m.role[0] }}{{ m.content }}<eos> {% endfor %}"
    "{% if add_generation_prompt %}<bos>a{% endif %}"
)
"""The first letter of the role, then the content; white space after the end of a turn, as real templates have."""


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def config_of(tmp_path: Path, rows: list[dict[str, Any]], *overrides: str) -> Config:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_config(None, ["algorithm.loss.ptx.coef=1", f"data.supervised=[{{path: {path}}}]", *overrides])


def loaded(
    tmp_path: Path, rows: list[dict[str, Any]], *overrides: str, bos: bool = False
) -> SupervisedDataset:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = SPOKEN
    if bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS_ID)]
        )
    return load_supervised(config_of(tmp_path, rows, *overrides), tokenizer)


def texts(dataset: SupervisedDataset) -> list[tuple[str, str]]:
    """(prompt, what trains) of each row, from the token ids."""
    tokenizer = build_tokenizer()
    decoded = [
        tuple(tokenizer.decode(ids.tolist()) for ids in (row.prompt_ids, row.completion_ids))
        for row in (dataset[i] for i in range(len(dataset)))
    ]
    return decoded  # pyright: ignore[reportReturnType]


def test_each_kind_of_row_trains_its_completion_alone(tmp_path: Path):
    # Mutations: train the prompt; tokenise prompt and completion with special tokens each; drop or double the end;
    # train every turn of a conversation, or the white space after its end.
    rows = [
        {"prompt": "ab", "completion": "cd"},
        {"prompt": [user("x")], "completion": "yz"},
        {"prompt": [user("x")], "completion": [assistant("yz")]},
        {"messages": [user("x"), assistant("1"), user("y"), assistant("2")]},
        {"text": "abcd", "messages": None, "completion": None},
    ]
    assert texts(loaded(tmp_path, rows, bos=True)) == [
        ("<bos>ab", "cd<eos>"),
        ("<bos>ux<eos> <bos>a", "yz<eos>"),
        ("<bos>ux<eos> <bos>a", "yz<eos>"),
        ("<bos>ux<eos> <bos>a1<eos> <bos>uy<eos> <bos>a", "2<eos>"),
        ("<bos>", "abcd<eos>"),
    ]
    assert texts(loaded(tmp_path, [{"text": "abcd"}, {"prompt": "ab", "completion": "c<eos>"}])) == [
        ("a", "bcd<eos>"),
        ("ab", "c<eos>"),
    ]


def test_strings_become_a_conversation_with_the_systems_message_as_the_prompts_do(tmp_path: Path):
    # Mutation: only the prompt is a message; the system prompt stands in one of the two texts alone.
    rows = [{"prompt": "ab", "completion": "cd"}, {"text": "ef"}]
    dataset = loaded(tmp_path, rows, "data.as_chat=true", "data.system_prompt=z")
    assert texts(dataset) == [("<bos>sz<eos> <bos>uab<eos> <bos>a", "cd<eos>"), ("e", "f<eos>")]
    with pytest.raises(
        DataError, match=r"rows.jsonl, line 1: the prompt is a string, and data.system_prompt"
    ):
        loaded(tmp_path, rows, "data.system_prompt=z")


def test_columns_of_other_names_are_filled_in_whatever_the_prompts_column_is(tmp_path: Path):
    # Mutation: read the column data.prompt_key.
    path = config_of(tmp_path, [{"q": "ab", "a": {"b": "cd"}}]).data.supervised[0].path
    columns = f"data.supervised=[{{path: {path}, columns: {{prompt: q, completion: a.b}}}}]"
    config = load_config(None, ["algorithm.loss.ptx.coef=1", columns, "data.prompt_key=question"])
    assert texts(load_supervised(config, build_tokenizer())) == [("ab", "cd<eos>")]


def test_rows_without_a_completion_and_rows_that_are_too_long_are_left_out_and_counted(tmp_path: Path):
    # Mutations: an EOS token is a completion; the bound is of the prompt alone; a row of its length is too long.
    rows = [
        {"prompt": "ab", "completion": ""},
        {"prompt": [user("x")], "completion": []},
        {"messages": [user("x"), assistant("  ")]},
        {"text": ""},
        {"text": "abcdefg"},
        {"prompt": "abc", "completion": "def"},
        {"prompt": "abc", "completion": "defg"},
    ]
    dataset = loaded(tmp_path, rows, "data.max_supervised_tokens=7")
    assert texts(dataset) == [("abc", "def<eos>")]
    (counts,) = dataset.counts
    assert (counts.num_rows, counts.num_kept, counts.num_without_completion, counts.num_too_long) == (
        7,
        1,
        4,
        2,
    )
    with pytest.raises(
        DataError, match="none of 7 rows is left: 4 have no completion and 3 are longer than 6 tokens"
    ):
        loaded(tmp_path, rows, "data.max_supervised_tokens=6")


def test_the_bound_is_that_of_the_longest_sequence_unless_it_is_given(tmp_path: Path):
    # Mutation: the longest prompt alone.
    config = config_of(tmp_path, [], "data.max_prompt_tokens=5", "rollout.max_completion_tokens=4")
    assert max_row_tokens(config) == 9
    assert max_row_tokens(config_of(tmp_path, [], "data.max_supervised_tokens=7")) == 7


def test_the_filter_counts_and_the_sources_lie_one_after_the_other(tmp_path: Path):
    # Mutation: counts over all sources.
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    one.write_text('{"text": "ab"}\n{"text": "xyz"}\n')
    other.write_text('{"text": "cd"}\n')
    (tmp_path / "short.py").write_text("def keep(row):\n    return len(row['text']) < 3\n")
    sources = f"[{{path: {one}, filter: '{tmp_path}/short.py:keep'}}, {other}]"
    config = load_config(None, ["algorithm.loss.ptx.coef=1", f"data.supervised={sources}"])
    dataset = load_supervised(config, build_tokenizer())
    assert texts(dataset) == [("a", "b<eos>"), ("c", "d<eos>")]
    assert [(counts.num_rows, counts.num_kept, counts.num_filtered) for counts in dataset.counts] == [
        (2, 1, 1),
        (1, 1, 0),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "x", "answer": "y"},
            "has prompt and completion, or messages, or text, and this one has answer, prompt",
        ),
        ({"completion": "x"}, "column 'prompt': missing"),
        ({"prompt": "", "completion": "x"}, "column 'prompt': an empty prompt"),
        ({"prompt": "x", "completion": 3}, "column 'completion': int; a completion is a string or a list"),
        (
            {"prompt": "x", "completion": [assistant("y")]},
            "a list of messages after a prompt that is a string; set data.as",
        ),
        ({"messages": [assistant("y")]}, "column 'messages': the last message is what trains"),
        ({"messages": [user("x"), user("y")]}, "it must be the assistant's, with at least one before it"),
        ({"messages": "x"}, "column 'messages': the last message is what trains"),
        ({"text": 3}, "column 'text': int; it must be a string"),
    ],
    ids=str,
)
def test_a_row_that_is_none_of_them_is_named_with_its_column(
    tmp_path: Path, row: dict[str, Any], message: str
):
    with pytest.raises(DataError, match=message) as caught:
        loaded(tmp_path, [{"text": "ok"}, row])
    assert "rows.jsonl, line 2" in str(caught.value)


def test_a_template_that_writes_another_prompt_beside_a_completion_is_refused(tmp_path: Path):
    # Mutation: cut the whole at the prompt's length.
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% if add_generation_prompt %}a{% else %}bc{% endif %}"
    config = config_of(tmp_path, [{"messages": [user("x"), assistant("y")]}])
    with pytest.raises(
        DataError, match=r"line 1: with the completion the chat template writes another prompt.*'b' for 'a'"
    ):
        load_supervised(config, tokenizer)


def test_other_tokens_or_another_cut_have_another_digest(tmp_path: Path):
    # Mutations: a digest of the tokens without the lengths, or of the lengths alone.
    tables = [
        {"prompt": "ab", "completion": "cd"},
        {"prompt": "abc", "completion": "d"},
        {"prompt": "ab", "completion": "ce"},
    ]
    digests = [loaded(tmp_path, [row]).digest for row in tables]
    assert len(set(digests)) == 3
    assert digests[0] == loaded(tmp_path, tables[:1]).digest
    assert max(digests) < 2**63
    assert loaded(tmp_path, tables).token_ids.dtype == np.int32
