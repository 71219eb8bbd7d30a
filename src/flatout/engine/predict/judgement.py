"""Predictions of rows turned into tables for people: by class, and wrong rows.

No torch: figures of a class are counts of three columns.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow.compute as pc

from flatout.engine.rows.layout import Ints
from flatout.engine.rows.opening import rows_from_dataset
from flatout.engine.tokenizing.tokenizer import TokenizerFile

logger = logging.getLogger(__name__)

SHOWN_NAMES = 10
MOST_CONFUSED = 1_000
"""Most classes of a confusion matrix; equals that of tasks/_shared/metrics.py."""
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ClassCounts:
    """Rows of each class, (C,) each."""

    names: Sequence[str]
    right: Counts
    true: Counts
    predicted: Counts
    confusion: list[list[int]]
    """(C, C): rows by true class, columns by predicted one. Empty with more than
    MOST_CONFUSED classes, for which it would be too large."""


def class_counts(predictions: pd.DataFrame, names: Sequence[str]) -> ClassCounts:
    """Count rows by the names in `label` and `prediction`; empty without names."""
    count, number = len(names), {name: place for place, name in enumerate(names)}
    if not count:
        none = np.zeros(0, np.int64)
        return ClassCounts(names, none, none, none, [])
    true, predicted = (
        predictions[column].map(number).to_numpy(np.int64)
        for column in ("label", "prediction")
    )
    cells = []
    if count <= MOST_CONFUSED:
        flat = np.bincount(true * count + predicted, minlength=count**2)
        cells = flat.reshape(count, count).tolist()
    return ClassCounts(
        names,
        np.bincount(true[true == predicted], minlength=count),
        np.bincount(true, minlength=count),
        np.bincount(predicted, minlength=count),
        cells,
    )


def class_table(counts: ClassCounts) -> pd.DataFrame:
    """Return a row per class: rows, predicted, precision, recall, f1. A division by
    zero gives zero, like in scikit-learn."""
    right, true, predicted = counts.right, counts.true, counts.predicted
    return pd.DataFrame(
        {
            "label": list(counts.names),
            "rows": true,
            "predicted": predicted,
            "precision": right / np.maximum(predicted, 1),
            "recall": right / np.maximum(true, 1),
            "f1": 2 * right / np.maximum(true + predicted, 1),
        }
    )


def class_figures(counts: ClassCounts) -> dict[str, Any]:
    """Return the most frequent class of the split, the accuracy of always predicting
    it, and the classes that have rows and are never predicted (a warning)."""
    names, true = counts.names, counts.true
    silent = np.flatnonzero((true > 0) & (counts.predicted == 0)).tolist()
    never = [names[place] for place in silent]
    if never:
        more = ", ..." if len(never) > SHOWN_NAMES else ""
        shown = ", ".join(map(repr, never[:SHOWN_NAMES])) + more
        logger.warning("classes that are never predicted: %d (%s)", len(never), shown)
    return {
        "majority_label": names[int(true.argmax())],
        "majority_accuracy": float(true.max() / true.sum()),
        "never_predicted": never,
    }


def baseline_figures(
    predictions: pd.DataFrame, rows: Any, *, is_language: bool
) -> dict[str, Any]:
    """Return the baseline of a task without classes: always the mean, always the most
    frequent set of labels, or each token by its frequency. `rows`: `datasets.Dataset`
    of the split."""
    if is_language:
        tokens = pc.list_flatten(rows.data.table.column("input_ids"))
        counts = pc.value_counts(tokens).field("counts").to_numpy()
        shares = counts / counts.sum()
        return {"unigram_loss": float(-(shares * np.log(shares)).sum())}
    if not len(predictions):
        return {}
    labels = predictions["label"]
    if pd.api.types.is_float_dtype(labels):
        return {"mean_label": labels.mean(), "mean_mse": labels.var(ddof=0)}
    most = labels.value_counts()
    return {
        "majority_label": most.index[0],
        "majority_accuracy": float(most.iloc[0] / len(labels)),
    }


def wrong_rows(
    predictions: pd.DataFrame, rows: Any, tokenizer: TokenizerFile | None, most: int
) -> pd.DataFrame:
    """Return the `most` wrong rows of the largest loss, with their texts decoded from
    the tokens, or their source files. `rows`: `datasets.Dataset` of the split."""
    wrong = predictions[predictions["wrong"].astype(bool)]
    kept = wrong.sort_values(["loss", "row"], ascending=[False, True]).head(most)
    opened, name = rows_from_dataset(rows), "text" if tokenizer else "source"

    def decode(ids: Ints) -> str:
        return str(tokenizer.backend.decode(ids.tolist(), True)) if tokenizer else ""

    told = [opened.readable(row, decode) for row in kept["row"].tolist()]
    columns = ["row", "label", "prediction", "score", "loss"]
    return kept[columns].assign(**{name: told})
