"""Compare how `train.audit` and cleanlab rank rows with wrong labels.

    python -m benchmarks.audit trec.csv --model FOLDER --epochs 4 --learning-rate 1e-4

The CSV file has the columns text and label. Some labels are replaced by random wrong
ones. The audit ranks the rows during one training run. cleanlab ranks them by
out-of-fold predictions of the same model, which need one training run per fold.
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

from benchmarks import training


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
    """Return a copy of the class numbers `labels` (N,) in which the fraction
    `given.wrong` is replaced by other classes."""
    chance = np.random.default_rng(given.seed)
    rows = chance.choice(len(labels), int(given.wrong * len(labels)), replace=False)
    found = labels.copy()
    found[rows] = (labels[rows] + chance.integers(1, classes, len(rows))) % classes
    return found


def audited(table: pa.Table, count: int, trained: Any) -> Any:
    """Return the numbers of the `count` rows that `train.audit` ranks as most suspect.
    `trained` is the function that trains a model on a table."""
    with tempfile.TemporaryDirectory(prefix="audit-") as name:
        trained(table, Path(name))
        path = Path(name) / "suspect_rows.parquet"
        return pq.read_table(path).column("row").to_numpy()[:count]


def by_cleanlab(
    table: pa.Table, count: int, trained: Any, tokenizer: Any, folds: int
) -> Any:
    """Return the numbers of the `count` rows that cleanlab's default score ranks as
    most suspect. `trained` is the function that trains a model on a table."""
    from cleanlab.rank import get_label_quality_scores
    from scipy.special import softmax

    labels = table.column("labels").to_numpy()
    fold = np.random.default_rng(1).permutation(len(labels)) % folds
    found = np.zeros((len(labels), labels.max() + 1))
    for number in range(folds):
        with tempfile.TemporaryDirectory(prefix="audit-") as name:
            unseen = np.flatnonzero(fold == number)
            model = trained(table.take(np.flatnonzero(fold != number)), Path(name))
            logits = training.logits_of(model, tokenizer, table.take(unseen))
            found[unseen] = softmax(logits, 1)
    return np.argsort(get_label_quality_scores(labels, found), kind="stable")[:count]


def main() -> None:
    from transformers import AutoTokenizer

    logging.basicConfig(level="INFO")
    given = parsed()
    data = pd.read_csv(given.file)
    if given.rows:
        data = data.sample(given.rows, random_state=given.seed)
    names, true = np.unique(data["label"].astype(str), return_inverse=True)
    labels = flipped(true, len(names), given)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    texts = [data["text"].tolist()]
    table = training.text_table(tokenizer, texts, labels, given.longest)
    wrong = set(np.flatnonzero(labels != true).tolist())

    train = {
        "global_batch_size": given.batch,
        "learning_rate": given.learning_rate,
        "epochs": given.epochs,
        "compile": False,
        "freeze": given.freeze,
        "audit": True,
    }

    def trained(rows: pa.Table, folder: Path) -> Any:
        return training.fine_tuned(
            rows, tokenizer, folder, names, given.seed, given.longest, **train
        )

    sides = {"audit": audited(table, len(wrong), trained)}
    if given.folds:
        sides["cleanlab"] = by_cleanlab(
            table, len(wrong), trained, tokenizer, given.folds
        )
    found = {n: len(wrong & {*own.tolist()}) / len(wrong) for n, own in sides.items()}
    sys.stdout.write(f"{json.dumps({'rows': len(labels), **found})}\n")


if __name__ == "__main__":
    main()
