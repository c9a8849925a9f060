"""GSM8K's JSONL files (columns question, answer) as parquet in verl's columns: one row of data for both.

    python scripts/make_gsm8k.py FOLDER_WITH_JSONL TARGET_FOLDER     # train.jsonl, test.jsonl -> *.parquet

The data set: https://github.com/openai/grade-school-math. Train on it with data.train=TARGET_FOLDER/train.parquet.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MARKER = "#### "


def verl_row(question: str, answer: str, split: str, index: int) -> dict[str, Any]:
    """One row. The ground truth is the number after the last marker, without thousands commas.

    Raises ValueError when the answer has no marker.
    """
    _, marker, number = answer.rpartition(MARKER)
    if not marker:
        raise ValueError(f"{split}, row {index} (from 0): the answer has no {MARKER!r}: {answer[-80:]!r}")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": number.strip().replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def convert(source: Path, target: Path) -> int:
    """Writes `target` from the JSONL file `source`; the split is the file's name. Returns the number of rows."""
    with source.open(encoding="utf-8") as file:  # splitlines() would end a line at U+2028 inside a string
        lines = [json.loads(line) for line in file if line.strip()]
    rows = [
        verl_row(line["question"], line["answer"], source.stem, index) for index, line in enumerate(lines)
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), target, row_group_size=1000)
    return len(rows)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("target", type=Path, help="folder for train.parquet and test.parquet")
    arguments = parser.parse_args()
    for split in ("train", "test"):
        target = arguments.target / f"{split}.parquet"
        print(f"{target}: {convert(arguments.source / f'{split}.jsonl', target)} rows")


if __name__ == "__main__":
    main()
