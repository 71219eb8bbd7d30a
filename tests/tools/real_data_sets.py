"""Public data sets: where they come from, how their files are read, what others reach.

| folder | files | from | licence |
|---|---|---|---|
| conll2003 | eng.train, .testa, .testb | synalp/NER | Reuters: research only |
| goemotions | train, dev, test.tsv, labels.txt | monologg/GoEmotions-pytorch | Apache |
| mrpc | train, dev.tsv; msr_paraphrase_test.txt | F0restL1n/BERT | research only |
| stsb | sts-train, -dev, -test.csv | Sanjithae/sensim | of its sources, mixed |
| gsm8k | train, test.jsonl | openai/grade-school-math | MIT |

All are repositories on GitHub. In them: corpus/CoNLL-2003, data/original,
glue_data/MRPC, data and grade_school_math/data. That copy of MRPC lacks one of GLUE's
training rows.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

SPLITS = ("train", "validation", "test")
Row = dict[str, Any]


def conll(file: Path) -> Iterator[Row]:
    """Sentences; IOB1 tags (B- only between neighbours) become IOB2."""
    lines = (line.split() for line in file.read_text(encoding="utf-8").split("\n"))
    for words, group in groupby(lines, key=bool):
        sentence = list(group)
        if words and sentence[0][0] != "-DOCSTART-":
            tags, before = [], "O"
            for tag in (line[-1] for line in sentence):
                begins = tag[0] == "I" and before[1:] != tag[1:]
                tags.append("B" + tag[1:] if begins else tag)
                before = tag
            yield {"tokens": [line[0] for line in sentence], "tags": tags}


def emotions(file: Path) -> Iterator[Row]:
    names = (file.parent / "labels.txt").read_text(encoding="utf-8").split()
    for text, labels, _ in _table(file):
        yield {"text": text, "labels": [names[int(n)] for n in labels.split(",")]}


def paraphrases(file: Path) -> Iterator[Row]:
    names = ("different", "paraphrase")
    for quality, _, _, first, second in list(_table(file))[1:]:
        yield {"text": first, "second": second, "label": names[int(quality)]}


def similarities(file: Path) -> Iterator[Row]:
    for _, _, _, _, score, first, second, *_ in _table(file):
        yield {"text": first, "second": second, "score": float(score)}


def problems(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    for row in rows:
        yield {"question": row["question"], "answer": "\n" + row["answer"]}


def _table(file: Path) -> Iterator[list[str]]:
    """Quotes are ordinary characters in these files."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        yield from csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)


@dataclass(frozen=True)
class DataSet:
    read: Callable[[Path], Iterator[Row]]
    files: tuple[str, ...]
    """Of train, validation and test; without the second one it is taken from train."""
    metric: str
    published: str
    parameters: dict[str, dict[str, Any]]

    def splits(self) -> tuple[str, ...]:
        return SPLITS if len(self.files) == len(SPLITS) else ("train", "test")


PAIR = {"text_pair_column": "second"}
SETS = {
    "conll2003": DataSet(
        conll,
        ("eng.train", "eng.testa", "eng.testb"),
        "f1",
        "0.924, BERT-base cased with document context (Devlin et al. 2019)",
        {
            "model": {"task": "token-classification"},
            "split": {"text_column": "tokens", "label_column": "tags"},
            "tokenize": {"max_length": 256},
            "train": {"epochs": 5},
        },
    ),
    "goemotions": DataSet(
        emotions,
        ("train.tsv", "dev.tsv", "test.tsv"),
        "f1_macro",
        "0.46, BERT-base cased (Demszky et al. 2020); "
        "0.503, the same (monologg/GoEmotions-pytorch)",
        {
            "model": {"task": "multi-label-classification", "label_threshold": 0.3},
            "split": {"label_column": "labels"},
            "tokenize": {"max_length": 64},
            "train": {"epochs": 10},
        },
    ),
    "mrpc": DataSet(
        paraphrases,
        ("train.tsv", "dev.tsv", "msr_paraphrase_test.txt"),
        "accuracy",
        "0.866, MiniLM of 6 layers of 384, on GLUE's validation rows (model card of "
        "microsoft/xtremedistil-l6-h384-uncased)",
        {
            "model": {"task": "sequence-classification"},
            "split": PAIR,
            "tokenize": {"max_length": 128},
            "train": {"epochs": 5},
        },
    ),
    "stsb": DataSet(
        similarities,
        ("sts-train.csv", "sts-dev.csv", "sts-test.csv"),
        "spearman",
        "0.858, BERT-base on GLUE's test rows (Devlin et al. 2019)",
        {
            "model": {"task": "regression"},
            "split": {**PAIR, "label_column": "score"},
            "tokenize": {"max_length": 128},
            "train": {"epochs": 5},
        },
    ),
    "gsm8k": DataSet(
        problems,
        ("train.jsonl", "test.jsonl"),
        "perplexity",
        "none: others publish solved problems",
        {
            "model": {
                "task": "causal-lm",
                "config": {
                    "model_type": "qwen3",
                    "hidden_size": 384,
                    "num_hidden_layers": 6,
                    "num_attention_heads": 6,
                    "num_key_value_heads": 6,
                    "head_dim": 64,
                    "intermediate_size": 1024,
                    "max_position_embeddings": 512,
                },
            },
            "split": {
                "prompt_column": "question",
                "completion_column": "answer",
                "label_column": None,
            },
            "tokenize": {"max_length": 512, "vocab_size": 8000},
            "train": {"epochs": 5, "learning_rate": 5e-4},
        },
    ),
}
COMMON = {"global_batch_size": 32, "learning_rate": 5e-5, "warmup_fraction": 0.1}
