"""Readable tables of predictions: metrics by class, and the worst errors.

This module needs no torch, because metrics by class are computed from counts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from flatout.engine.parameters.faults import some_of
from flatout.engine.rows.layout import Ints
from flatout.engine.rows.rows import rows_from_dataset
from flatout.engine.tokenizing.tokenizer import TokenizerFile

logger = logging.getLogger(__name__)
SHOWN_NAMES = 10
MOST_CONFUSED = 1_000
"""Maximum number of classes for a confusion matrix, which grows quadratically."""


def class_table(predictions: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Return the rows, predictions, precision, recall and F1 of each class, or an empty
    table without classes. A division by zero gives zero."""
    label, predicted = predictions["label"], predictions["prediction"]
    columns = {
        "rows": label,
        "predicted": predicted,
        "right": label[label == predicted],
    }
    counts = pd.DataFrame(
        {
            name: column.value_counts().reindex([*names], fill_value=0).to_numpy()
            for name, column in columns.items()
        }
    )
    rows, predicted, right = (counts[name] for name in columns)
    return pd.DataFrame(
        {
            "label": list(names),
            "rows": rows,
            "predicted": predicted,
            "precision": right / predicted.clip(lower=1),
            "recall": right / rows.clip(lower=1),
            "f1": 2 * right / (rows + predicted).clip(lower=1),
        }
    )


def confusion(predictions: pd.DataFrame, names: Sequence[str]) -> list[list[int]]:
    """Return the confusion matrix, with one row per true class and one column per
    predicted class, or [] if there are more than MOST_CONFUSED classes."""
    if not 0 < len(names) <= MOST_CONFUSED:
        return []
    counts = pd.crosstab(predictions["label"], predictions["prediction"])
    counts = counts.reindex(index=[*names], columns=[*names], fill_value=0)
    return counts.to_numpy(np.int64).tolist()


def baseline_figures(
    predictions: pd.DataFrame, classes: pd.DataFrame
) -> dict[str, Any]:
    """Return the most frequent label (or set of labels), the accuracy of always
    predicting this label, and the classes that have rows but are never predicted. Log a
    warning about such classes. `classes` is the result of `class_table`. The result is
    empty if the labels are numbers or there are no rows."""
    labels = predictions["label"]
    if not len(labels) or pd.api.types.is_float_dtype(labels):
        return {}
    counts = labels.value_counts().sort_index()
    figures = {
        "majority_label": counts.idxmax(),
        "majority_accuracy": float(counts.max() / len(labels)),
    }
    if not len(classes):
        return figures
    silent = (classes["rows"] > 0) & (classes["predicted"] == 0)
    never = classes["label"][silent].tolist()
    if never:
        shown = some_of(never, SHOWN_NAMES)
        logger.warning("classes that are never predicted: %d (%s)", len(never), shown)
    return {**figures, "never_predicted": never}


def wrong_rows(
    predictions: pd.DataFrame, rows: Any, tokenizer: TokenizerFile | None, most: int
) -> pd.DataFrame:
    """Return the `most` wrong predictions with the largest loss, with the decoded text
    of each row or the source file of a sample. `rows` is a `datasets.Dataset`."""
    wrong = predictions[predictions["wrong"].astype(bool)]
    kept = wrong.sort_values(["loss", "row"], ascending=[False, True]).head(most)
    opened, name = rows_from_dataset(rows), "text" if tokenizer else "source"

    def decode(ids: Ints) -> str:
        return str(tokenizer.backend.decode(ids.tolist(), True)) if tokenizer else ""

    texts = [opened.readable(row, decode) for row in kept["row"].tolist()]
    columns = ["row", "label", "prediction", "score", "loss"]
    return kept[columns].assign(**{name: texts})
