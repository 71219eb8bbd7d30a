"""A saved model applied to samples of one shape: numbers in files, images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.arrays.opening import open_source
from flatout.engine.arrays.sources import ArraySource
from flatout.engine.parameters import Settings
from flatout.engine.predict.checks import shape_of
from flatout.engine.predict.predicting import REASON, Predictions, Window, windows_of
from flatout.engine.predict.predictor import Predictor
from flatout.engine.rows.arrays import ArrayRows
from flatout.engine.rows.fixed_lists import array_of

PLACES = [pa.field("source", pa.string()), pa.field("row", pa.int64())]


def predict_samples(
    model: Any, path: Path, kind: str, settings: Settings
) -> Predictions:
    """Return predictions of `model` (of `from_pretrained`) for the samples in `path`, a
    file or folder. `kind`: as in `train.rows`. Raises ModelError, SettingsError."""
    predictor, own = Predictor(model, None, settings), getattr(settings, kind)
    if kind == "images":
        height, _, channels = shape_of(model.config)
        own = own.model_copy(update={"size": height, "channels": channels})
    source = open_source(path, settings.split.label_column, own, is_labelled=False)
    return Predictions(partial(_windows, source, predictor), PLACES, predictor)


def _windows(source: ArraySource, predictor: Predictor) -> Iterator[Window]:
    for window in windows_of(predictor.settings.shard, source.windows):
        faults = window.faults_for(predictor.shape)
        places = [window.place(number) for number in range(len(window.values))]
        table = pa.Table.from_pylist(
            [
                {"source": source, "row": row, "reason": faults.get(number)}
                for number, (source, row) in enumerate(places)
            ],
            schema=pa.schema([*PLACES, REASON]),
        )
        usable = table.column("reason").is_null().to_numpy()
        yield table, _rows(predictor, window.values[usable]) if usable.any() else None


def answers_to(predictor: Predictor, samples: npt.NDArray[Any]) -> Mapping[str, Any]:
    """Return the task's answers, by column, to `samples` (N, ...) of its shape."""
    return predictor.task.answers(
        predictor.calibrated_logits(_rows(predictor, samples))
    )


def _rows(predictor: Predictor, samples: npt.NDArray[Any]) -> ArrayRows:
    task = predictor.task
    unread = np.zeros((len(samples), *task.label_shape), task.label_dtype)
    return ArrayRows(
        pa.table({"inputs": array_of(samples), "labels": array_of(unread)})
    )
