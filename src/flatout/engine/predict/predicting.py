"""Predictions of a saved model for texts or samples: one per row, in row order.

Rows are read, predicted and returned window by window, so that memory use does not grow
with the file. A row that cannot be used keeps its position in the output, with the
reason in place of a prediction.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.arrays.array_files import ArrayFiles, open_source
from flatout.engine.arrays.sources import ArraySource
from flatout.engine.data.raw_texts import RawTexts, open_raw_texts
from flatout.engine.models.row_faults import end_faults
from flatout.engine.parameters import Settings, SettingsError
from flatout.engine.predict.checks import shape_of
from flatout.engine.predict.predictor import Predictor
from flatout.engine.predict.texts import (
    TextEncoder,
    check_columns,
    reject_rows,
    text_windows,
    window_schema,
)
from flatout.engine.rows import KINDS
from flatout.engine.rows.rows import SplitRows, array_of, rows_from_dataset, rows_of
from flatout.engine.tokenizing.tokenizer import TokenizerFile

logger = logging.getLogger(__name__)

SHOWN_REASONS = 5
REASON = pa.field("reason", pa.string())
Item = TypeVar("Item")
Window = tuple[Any, SplitRows | None]
"""A table of all rows of a window, with the columns to copy to the output and `reason`
(null for usable rows), and the usable rows, or None if there are none."""


@dataclass(frozen=True)
class Predictions:
    """Lazy table of predictions. The columns are `source`, `row`, `id` and the texts
    (if they are kept), the task's outputs (such as label, score and probabilities), and
    `reason`. The rows are computed while iterating over `batches`."""

    windows: Callable[[], Iterator[Window]]
    kept: Sequence[Any]
    """The Arrow fields that are copied from the windows to the table."""
    predictor: Predictor

    @property
    def schema(self) -> Any:
        return pa.schema([*self.kept, *self.predictor.task.answer_fields(), REASON])

    def batches(self) -> Iterator[Any]:
        """Yield a RecordBatch for each window, with its rows in order."""
        started, rows, reasons = time.perf_counter(), 0, Counter[str]()
        for window, usable in self.predictor.prefetch(self.windows()):
            rows += window.num_rows
            reasons.update(window.column("reason").drop_null().to_pylist())
            yield self._answers(window, usable)
        _log_rate(self.predictor, rows, time.perf_counter() - started, reasons)

    def _answers(self, window: Any, rows: SplitRows | None) -> Any:
        usable = window.column("reason").is_null().to_numpy()
        named = {name: window.column(name) for name in window.column_names}
        task, answers = self.predictor.task, dict[str, Any]()
        if rows is not None:
            answers |= task.row_answers(self.predictor.calibrated_logits(rows), rows)
        # The index of each row's prediction, or null for unusable rows.
        place = pa.array(np.cumsum(usable) - 1, mask=~usable)
        for field in task.answer_fields():
            column = pa.array(answers.get(field.name, []), field.type)
            named[field.name] = column.take(place)
        columns = [named[name] for name in self.schema.names]
        table = pa.table(columns, schema=self.schema)
        return table.combine_chunks().to_batches()[0]


def predict(
    model: Any, tokenizer: TokenizerFile, texts: Any, settings: Settings
) -> Predictions:
    """Return the predictions of `model` (from `from_pretrained`) for `texts`, which may
    be any input of `open_raw_texts`. Raises ModelError, RawTextsError or SettingsError
    if the model, texts and settings do not fit together."""
    raw = open_raw_texts(texts, "predict_texts")
    settings = settings.changed(_chosen_columns(raw, settings))
    columns = settings.predict
    check_columns(raw, columns)
    predictor = Predictor(model, tokenizer, settings)
    if columns.text_pair_column and predictor.task.texts.form in ("words", "pairs"):
        raise SettingsError(
            f"predict.text_pair_column cannot be used with model.task "
            f"{predictor.task.settings.task}, which reads one text per row: set it to "
            "null"
        )
    encoder = TextEncoder(predictor, model, tokenizer)

    def encoded(window: Any) -> Window:
        good = window.filter(window.column("reason").is_null()).combine_chunks()
        if not good.num_rows:
            return window, None
        texts = [good.column(n) for n in good.column_names if _is_text(n)]
        tokens = encoder.encode(*(column.combine_chunks() for column in texts))
        faults = end_faults(model, tokens)
        return encoded(reject_rows(window, faults)) if faults else (window, tokens)

    def windows() -> Iterator[Window]:
        read = partial(text_windows, raw, columns, predictor.task.texts.form)
        return map(encoded, windows_of(columns.shard, read))

    fields = list(window_schema(columns))[:-1]
    kept = [f for f in fields if columns.keep_text or not _is_text(f.name)]
    return Predictions(windows, kept, predictor)


def windows_of(shard: str | None, read: Callable[[], Iterator[Item]]) -> Iterator[Item]:
    """Return an iterator over the windows of a shard ("i/n"), or over all windows if
    `shard` is None. A shard is a contiguous range of windows. `read` returns an
    iterator over all windows. For a shard, it is also called once to count them."""
    if shard is None:
        return read()
    number, count = map(int, shard.split("/"))
    total = sum(1 for _ in read())
    start, stop = total * (number - 1) // count, total * number // count
    logger.info("shard %s: windows %d to %d of %d", shard, start + 1, stop, total)
    if start == stop:
        logger.warning(
            "shard %s has no rows, because there are fewer windows than shards: lower "
            "predict.window_rows",
            shard,
        )
    return islice(read(), start, stop)


def _chosen_columns(raw: RawTexts, settings: Settings) -> dict[str, str | None]:
    """Return the text columns by the name of their setting. By default, these are the
    columns set in `split`, or those that the pipeline `split` wrote."""
    chosen, split, present = settings.predict, settings.split, raw.column_names
    columns = {}
    keys = ("text_column", "text_pair_column")
    others = ("text", "text_pair"), ("query_column", "passage_column")
    for key, written, ranked in zip(keys, *others, strict=True):
        column, found = getattr(chosen, key), f"predict.{key}"
        if column is None:
            own = ranked if split.query_column else key
            column, found = getattr(split, own), f"split.{own}"
            if column is not None and column not in present and written in present:
                column, found = written, "as split writes it"
        if column is not None:
            logger.info("predict_texts: column %r (%s)", column, found)
        columns[f"predict.{key}"] = column
    return columns


def _is_text(name: str) -> bool:
    return name in ("text", "text_pair")


def _log_rate(
    predictor: Predictor, rows: int, elapsed_s: float, reasons: Counter[str]
) -> None:
    unused, rate = sum(reasons.values()), rows / max(elapsed_s, 1e-9)
    logger.info(
        "%s rows predicted, %s rows/s (%s x %d, %s, %s)",
        f"{rows - unused:,}",
        f"{rate:,.0f}",
        predictor.runtime.device_name,
        len(predictor.devices),
        predictor.runtime.precision,
        predictor.strategy,
    )
    if reasons:
        most = reasons.most_common(SHOWN_REASONS)
        logger.warning(
            "%s of %s rows have no prediction; reasons (column reason): %s",
            f"{unused:,}",
            f"{rows:,}",
            ", ".join(f"{text} ({count:,})" for text, count in most),
        )


PLACES = [pa.field("source", pa.string()), pa.field("row", pa.int64())]


def predict_samples(
    model: Any, path: Path, kind: str, settings: Settings
) -> Predictions:
    """Return the predictions of `model` for the samples in `path`. `kind` is a value of
    `train.rows`. For a custom kind, `path` is a `datasets.Dataset` with its columns.
    Raises ModelError or SettingsError if they do not fit."""
    predictor = Predictor(model, None, settings)
    if kind not in KINDS:
        windows = partial(_stored_windows, rows_from_dataset(path), predictor)
        return Predictions(windows, PLACES, predictor)
    own = getattr(settings, kind)
    if kind == "images":
        height, _, channels = shape_of(model.config)
        own = own.model_copy(update={"size": height, "channels": channels})
    source = open_source(path, settings.split.label_column, own, is_labelled=False)
    if isinstance(source, ArrayFiles):
        names = getattr(model.config, "input_names", ())
        source = replace(source, trained_on=tuple(names))
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


def _stored_windows(rows: SplitRows, predictor: Predictor) -> Iterator[Window]:
    size, schema = predictor.settings.window_rows, pa.schema([*PLACES, REASON])
    starts = partial(iter, range(0, len(rows), size))
    for start in windows_of(predictor.settings.shard, starts):
        part, numbers = rows.table.slice(start, size), range(len(rows))[start:][:size]
        places = [{"source": rows.readable(n, str), "row": n} for n in numbers]
        usable = _unlabelled(predictor, part)
        yield pa.Table.from_pylist(places, schema=schema), usable


def answers_to(predictor: Predictor, samples: npt.NDArray[Any]) -> Mapping[str, Any]:
    """Return the predictions for `samples` (N, ...) as columns by name. The samples
    must have the shape that the model expects."""
    return predictor.task.answers(
        predictor.calibrated_logits(_rows(predictor, samples))
    )


def _rows(predictor: Predictor, samples: npt.NDArray[Any]) -> SplitRows:
    return _unlabelled(predictor, pa.table({"inputs": array_of(samples)}))


def _unlabelled(predictor: Predictor, table: pa.Table) -> SplitRows:
    """Return the rows of `table` with labels that are not read."""
    task = predictor.task
    unread = np.zeros((len(table), *task.label_shape), task.label_dtype)
    columns = {name: table.column(name) for name in table.column_names}
    return rows_of(pa.table({**columns, "labels": array_of(unread)}))
