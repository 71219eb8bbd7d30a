"""Files of public data sets become rows as they should."""

from __future__ import annotations

import pytest

from tests.tools import real_data
from tests.tools.real_data_sets import SETS

RAW = {
    "conll2003": (
        "-DOCSTART- -X- O O\n\nJapan NNP I-NP I-LOC\nChina NNP I-NP B-LOC\n"
        "Nadim NNP I-NP I-PER\nLadki NNP I-NP I-PER\n. . O O\n\nWell RB O O\n",
        [
            {
                "tokens": ["Japan", "China", "Nadim", "Ladki", "."],
                "tags": ["B-LOC", "B-LOC", "B-PER", "I-PER", "O"],
            },
            {"tokens": ["Well"], "tags": ["O"]},
        ],
    ),
    "goemotions": (
        'Oh "no\t0,2\tid1\n',
        [{"text": 'Oh "no', "labels": ["joy", "awe"]}],
    ),
    "mrpc": (
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t5\t6\tOne "\tTwo\n',
        [{"text": 'One "', "second": "Two", "label": "paraphrase"}],
    ),
    "stsb": (
        "news\tx\t2012\t0001\t3.800\tA man .\tA boy .\tsource\tsource\n",
        [{"text": "A man .", "second": "A boy .", "score": 3.8}],
    ),
    "gsm8k": (
        '{"question": "1+1?", "answer": "#### 2"}\n',
        [{"question": "1+1?", "answer": "\n#### 2"}],
    ),
}


@pytest.mark.parametrize("name", SETS)
def test_raw_files_become_rows(name, tmp_path):
    raw, rows = RAW[name]
    (tmp_path / "labels.txt").write_text("joy\nfear\nawe\n")
    (tmp_path / "raw").write_text(raw, encoding="utf-8")
    assert list(SETS[name].read(tmp_path / "raw")) == rows


@pytest.mark.parametrize("name", SETS)
def test_converted_files_are_the_splits_of_a_run(name, tmp_path):
    folder = tmp_path / "raw" / name
    folder.mkdir(parents=True)
    (folder / "labels.txt").write_text("joy\nfear\nawe\n")
    for file in SETS[name].files:
        (folder / file).write_text(RAW[name][0], encoding="utf-8")
    real_data.convert(tmp_path / "raw", tmp_path / "data", [name])
    made = {file.name for file in (tmp_path / "data" / name).iterdir()}
    assert made == {f"{split}.jsonl.gz" for split in SETS[name].splits()}
