"""Compare how `train.audit` and cleanlab rank rows with wrong labels.

    python -m benchmarks.audit trec.csv --model FOLDER --epochs 4 --learning-rate 1e-4

The CSV file has the columns text and label. Some labels are replaced by random wrong
ones. The audit ranks the rows of one training run. cleanlab ranks them by the
predictions of the same model for unseen rows, which takes one training run per fold.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

FEW = 200
"""Number of rows in the validation and test splits, which do not affect the result."""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit")
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", required=True, help="checkpoint")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--longest", type=int, default=64, help="tokens per row")
    parser.add_argument("--rows", type=int, help="number of random rows to use")
    parser.add_argument("--wrong", type=float, default=0.05, help="wrong share")
    parser.add_argument("--folds", type=int, default=5, help="0 skips cleanlab")
    parser.add_argument("--freeze", nargs="+", default=[], help="as train.freeze")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def flipped(labels: Any, classes: int, given: argparse.Namespace) -> Any:
    """Return a copy of `labels` (N,) in which some are replaced by other classes."""
    chance = np.random.default_rng(given.seed)
    rows = chance.choice(len(labels), int(given.wrong * len(labels)), replace=False)
    found = labels.copy()
    found[rows] = (labels[rows] + chance.integers(1, classes, len(rows))) % classes
    return found


def job_of(table: pa.Table, names: Any, given: argparse.Namespace, folder: Path) -> Any:
    from transformers import AutoTokenizer

    from flatout.engine.parameters import parse_settings
    from flatout.engine.rows.tokens import TokenRows
    from flatout.engine.rows.vocabulary import Vocabulary
    from flatout.engine.train.setup.job import TrainJob

    train = {
        "global_batch_size": given.batch,
        "learning_rate": given.learning_rate,
        "epochs": given.epochs,
        "compile": False,
        "freeze": given.freeze,
        "distributed": {"num_processes": 1},
        "audit": True,
    }
    model = {"task": "sequence-classification", "name_or_path": given.model}
    settings = parse_settings(
        {
            "runtime": {"seed": given.seed},
            "model": model,
            "tokenize": {"max_length": given.longest},
            "train": train,
        }
    )
    few = TokenRows(table.slice(0, FEW))
    vocabulary = Vocabulary.of(AutoTokenizer.from_pretrained(given.model))
    places = folder / "run", folder / "metrics.jsonl"
    return TrainJob(
        settings, TokenRows(table), few, few, vocabulary, tuple(names), *places, "k"
    )


def trained(job: Any) -> Any:
    from flatout.engine.machine.runtime import set_up
    from flatout.engine.train.loop import train

    train(job, set_up(job.settings.runtime))
    return job.work_folder / "last"


def audited(job: Any, count: int) -> Any:
    """Return the `count` most suspect rows according to `train.audit`."""
    trained(job)
    path = job.metrics_file.with_name("suspect_rows.parquet")
    return pq.read_table(path).column("row").to_numpy()[:count]


def by_cleanlab(table: pa.Table, count: int, make: Any, folds: int) -> Any:
    """Return the `count` rows that cleanlab's default score ranks as most suspect."""
    from cleanlab.rank import get_label_quality_scores

    labels = table.column("labels").to_numpy()
    fold = np.random.default_rng(1).permutation(len(labels)) % folds
    found = np.zeros((len(labels), labels.max() + 1))
    for number in range(folds):
        with tempfile.TemporaryDirectory(prefix="audit-") as name:
            unseen = np.flatnonzero(fold == number)
            job = make(table.take(np.flatnonzero(fold != number)), Path(name))
            found[unseen] = probabilities(job, trained(job), table.take(unseen))
    return np.argsort(get_label_quality_scores(labels, found), kind="stable")[:count]


def probabilities(job: Any, folder: Path, table: pa.Table) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification as Model

    model, found = Model.from_pretrained(folder).eval(), []
    ids = table.column("input_ids").to_pylist()
    order = np.argsort([len(own) for own in ids], kind="stable")
    with torch.inference_mode():
        for start in range(0, len(order), FEW):
            own = [torch.tensor(ids[row]) for row in order[start : start + FEW]]
            padded = torch.nn.utils.rnn.pad_sequence(own, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence(
                [torch.ones_like(row) for row in own], batch_first=True
            )
            logits = model(input_ids=padded, attention_mask=mask).logits
            found.append(logits.softmax(-1).numpy())
    return np.concatenate(found)[np.argsort(order, kind="stable")]


def main() -> None:
    from transformers import AutoTokenizer

    logging.basicConfig(level="INFO")
    given = parsed()
    data = pd.read_csv(given.file)
    if given.rows:
        data = data.sample(given.rows, random_state=given.seed)
    names, true = np.unique(data["label"], return_inverse=True)
    labels = flipped(true, len(names), given)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    ids = tokenizer(data["text"].tolist(), truncation=True, max_length=given.longest)
    columns = {
        "input_ids": pa.array(ids["input_ids"], pa.list_(pa.int32())),
        "labels": labels,
    }
    table, wrong = pa.table(columns), set(np.flatnonzero(labels != true).tolist())

    def make(rows: pa.Table, folder: Path) -> Any:
        return job_of(rows, names, given, folder)

    with tempfile.TemporaryDirectory(prefix="audit-") as name:
        sides = {"audit": audited(make(table, Path(name)), len(wrong))}
    if given.folds:
        sides["cleanlab"] = by_cleanlab(table, len(wrong), make, given.folds)
    found = {n: len(wrong & {*own.tolist()}) / len(wrong) for n, own in sides.items()}
    sys.stdout.write(f"{json.dumps({'rows': len(labels), **found})}\n")


if __name__ == "__main__":
    main()
