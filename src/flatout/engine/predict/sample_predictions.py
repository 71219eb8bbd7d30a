"""A saved model applied to samples of one shape: numbers in files, images.

A window at a time, so that memory does not grow with the files. A sample that cannot be
used keeps its place, with the reason.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.arrays.opening import open_source
from flatout.engine.arrays.sources import ArraySource, Window
from flatout.engine.parameters import Settings
from flatout.engine.predict.checks import shape_of
from flatout.engine.predict.predicting import log_rate
from flatout.engine.predict.predictor import Predictor
from flatout.engine.rows.arrays import ArrayRows
from flatout.engine.rows.fixed_lists import array_of


@dataclass(frozen=True)
class SamplePredictions:
    """Recipe of a table: source, row; label, score and a probability a class, or value;
    reason. Carried out by reading `batches` once."""

    source: ArraySource
    predictor: Predictor

    @property
    def schema(self) -> Any:
        places = [pa.field("source", pa.string()), pa.field("row", pa.int64())]
        answers = self.predictor.task.answer_fields()
        return pa.schema([*places, *answers, pa.field("reason", pa.string())])

    def batches(self) -> Iterator[Any]:
        """A RecordBatch a window, samples in their order."""
        started, rows, reasons = time.perf_counter(), 0, Counter[str]()
        for window in self.predictor.ahead(self.source.windows()):
            faults = window.faults_for(self.predictor.shape)
            rows += len(window.values)
            reasons.update(faults.values())
            yield self._answers(window, faults)
        log_rate(self.predictor, rows, time.perf_counter() - started, reasons)

    def _answers(self, window: Window, faults: Mapping[int, str]) -> Any:
        numbers = range(len(window.values))
        places = [window.place(row) for row in numbers]
        usable = ~np.isin(np.array(numbers), list(faults))
        answers: Mapping[str, Any] = {}
        if usable.any():
            answers = answers_to(self.predictor, window.values[usable])
        # Number of each sample's answer; null where it has none.
        place = pa.array(np.cumsum(usable) - 1, mask=~usable)
        columns = {
            "source": pa.array([source for source, _ in places], pa.string()),
            "row": pa.array([row for _, row in places], pa.int64()),
            "reason": pa.array([faults.get(row) for row in numbers], pa.string()),
        }
        for field in self.predictor.task.answer_fields():
            columns[field.name] = pa.array(answers.get(field.name, []), field.type)
            columns[field.name] = columns[field.name].take(place)
        named = {name: columns[name] for name in self.schema.names}
        return pa.record_batch(named, schema=self.schema)


def answers_to(predictor: Predictor, samples: npt.NDArray[Any]) -> Mapping[str, Any]:
    """Columns of the task's answers to `samples` (N, ...), of the predictor's shape."""
    task = predictor.task
    unread = np.zeros((len(samples), *task.label_shape), task.label_dtype)
    table = pa.table({"inputs": array_of(samples), "labels": array_of(unread)})
    return task.answers(predictor.logits(ArrayRows(table)))


def predict_samples(
    model: Any, path: Path, kind: str, settings: Settings
) -> SamplePredictions:
    """What `model` (of `from_pretrained`) says of the samples in `path`, a file or a
    folder. `kind`: as `train.rows` names it. Raises ModelError, SettingsError."""
    predictor = Predictor(model, None, settings)
    if kind == "images":
        height, _, channels = shape_of(model.config)
        size = {"size": height, "channels": channels}
        images = settings.images.model_copy(update=size)
        settings = settings.model_copy(update={"images": images})
    source = open_source(kind, path, settings, is_told=False)
    return SamplePredictions(source, predictor)
