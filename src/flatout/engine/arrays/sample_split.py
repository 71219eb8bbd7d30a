"""Validate and split samples that have the same shape."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from flatout.engine.arrays.sources import ArraySource, Window
from flatout.engine.data.column_checks import Faults, read_label
from flatout.engine.data.labels import label_counts, ordered_names
from flatout.engine.data.raw_texts import SPLITS, RawBatch, column_of_mixed
from flatout.engine.data.row_facts import FactCollector, Hashes
from flatout.engine.data.rows import rejected_batch
from flatout.engine.data.split import SplitPlan
from flatout.engine.data.split_report import row_counts, summary_text
from flatout.engine.files.arrow_folder import Spool
from flatout.engine.parameters import SplitSettings
from flatout.engine.rows.encoded_images import with_files
from flatout.engine.rows.rows import array_of, values_in
from flatout.engine.tasks import Task

logger = logging.getLogger(__name__)

FINE = 1e-3
"""Largest acceptable float32 rounding step, as a fraction of the range of values."""
INPUTS, LABEL = "inputs", "label"


class SampleSplit(SplitPlan):
    """Assigns each sample to a split. Duplicate samples are kept."""

    def __init__(
        self, source: ArraySource, settings: SplitSettings, task: Task
    ) -> None:
        kept = settings.model_copy(update={"keep_duplicates": True})
        super().__init__(kept, task.label_type, source.kind)
        self.source, self.task = source, task
        self._values = _Values()

    def _read_rows(self, collected: FactCollector, spool: Spool) -> None:
        values = self._values = _Values()
        for window in self.source.windows():
            labels, faults = self._labels_and_faults(window, values.shape_with(window))
            bad = [
                (*window.place(n), faults[n], window.excerpt(n)) for n in sorted(faults)
            ]
            collected.reject(rejected_batch(bad), len(window.values))
            rows = np.setdiff1d(np.arange(len(window.values)), list(faults))
            labels = labels.take(pa.array(rows))
            self._add(collected, window, rows)
            collected.add_labels(labels if self.has_names else pa.nulls(len(rows)))
            if len(rows):
                values.add(window.values[rows])
                for batch in self._stored(window, rows, labels):
                    spool.add(batch)
        spool.close()
        if not values.have_final_dtype:
            # Samples with equal values must have equal hashes, even if their dtypes
            # differ.
            hashes = [_hashes(values_in(b.column(INPUTS)), values.dtype) for b in spool]
            collected.replace(exact=[h[:, None] for h in hashes], near=hashes)

    def _labels_and_faults(
        self, window: Window, shape: tuple[int, ...] | None
    ) -> tuple[Any, dict[int, str]]:
        """Return the labels (n,) of a window's rows, and a mapping from the index of
        each rejected row to the reason. Samples must have the shape `shape`, if it is
        known."""
        count, kind = len(window.values), self.task.label_type
        faults = window.faults_for(shape)
        if kind is None:
            return pa.nulls(count), faults
        given = window.labels or [None] * count
        labels, found = _read_labels(given, kind)
        return labels, {row: why for row, (_, why) in found.reasons.items()} | faults

    def _add(self, collected: FactCollector, window: Window, rows: Any) -> None:
        hashes = _hashes(window.values[rows], stored_as(window.values.dtype))
        places = [window.place(row) for row in rows.tolist()]
        collected.add(
            [source for source, _ in places],
            exact=hashes[:, None],
            near=hashes,
            rows=np.array([number for _, number in places], np.int64),
            splits=np.full(len(rows), -1, np.int8),
        )

    def _stored(self, window: Window, rows: Any, labels: Any) -> Any:
        """Return the record batches to store for the rows with the indices `rows` (n,)
        in a window."""
        columns = {}
        if self.task.label_type is not None:
            columns["labels"] = self.task.encode_labels(labels)
        columns["source"] = pa.array([window.name(row) for row in rows.tolist()])
        if window.files is None:
            inputs = array_of(window.values[rows])
            return [pa.record_batch({INPUTS: inputs, **columns})]
        files = [window.files[row] for row in rows.tolist()]
        return with_files(pa.record_batch(columns), files, window.values.shape)

    def _chosen(self, batch: Any, mask: npt.NDArray[np.bool_]) -> Any:
        """Return the rows of `batch` selected by `mask` (n,). The samples are selected
        with NumPy, because Arrow's filter copies values one by one."""
        if INPUTS not in batch.schema.names:
            return super()._chosen(batch, mask)
        values = values_in(batch.column(INPUTS))[mask]
        rest = batch.drop_columns([INPUTS]).filter(pa.array(mask))
        columns = {INPUTS: array_of(values.astype(self._values.dtype, copy=False))}
        columns |= dict(zip(rest.schema.names, rest.columns, strict=True))
        return pa.record_batch(columns)

    @cached_property
    def report(self) -> dict[str, Any]:
        """The split report, with row counts by split, rejection reason and label."""
        facts, codes = self.facts, self.codes
        report = {
            "shape": list(self._values.shape or ()),
            **row_counts(facts, codes, self.rejected),
            "repeated": len(facts.near) - len(np.unique(facts.near)),
            "labels": {
                split: dict(label_counts(facts, codes == code))
                for code, split in enumerate(SPLITS if self.has_names else ())
            },
            **self.source.facts(),
        }
        logger.info(summary_text(report, self.rejected))
        return report


class _Values:
    """Tracks the shape and range of the samples, window by window."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] | None = None
        self._dtypes: set[Any] = set()
        self._low: Any = np.inf
        self._high: Any = -np.inf

    def shape_with(self, window: Window) -> tuple[int, ...] | None:
        """Return the shape that all samples must have, or None if no sample has been
        readable so far. The first window with a readable sample sets the shape."""
        has_values = window.values[:1].size and len(window.faults) < len(window.values)
        if self.shape is None and has_values:
            self.shape = window.values.shape[1:]
        return self.shape

    def add(self, values: npt.NDArray[Any]) -> None:
        """Update the dtypes and the range with n usable samples (n, ...)."""
        self._dtypes.add(values.dtype)
        if values.dtype == np.float64:
            self._low = np.minimum(self._low, values.min(0))
            self._high = np.maximum(self._high, values.max(0))

    @property
    def dtype(self) -> Any:
        """The dtype of the stored samples. It is uint8 if all samples are uint8,
        float64 if float32 is too coarse, and float32 otherwise. For example, float32
        rounds current Unix times to multiples of 128 s."""
        spread = np.maximum(self._high - self._low, 0)
        largest = np.maximum(np.abs(self._high), np.abs(self._low))
        step = np.finfo(np.float32).eps * np.where(spread > 0, largest, 0)
        if (step > FINE * spread).any():
            return np.dtype(np.float64)
        only_bytes = self._dtypes == {np.dtype(np.uint8)}
        return np.dtype(np.uint8 if only_bytes else np.float32)

    @property
    def have_final_dtype(self) -> bool:
        """Return whether the samples of all windows were hashed as `dtype` values."""
        return {stored_as(found) for found in self._dtypes} <= {self.dtype}


def stored_as(dtype: Any) -> Any:
    """Return the dtype in which `dtype` values are hashed first and usually stored:
    uint8 for uint8, and float32 for all other dtypes."""
    return dtype if dtype == np.uint8 else np.dtype(np.float32)


def _hashes(values: npt.NDArray[Any], dtype: Any) -> Hashes:
    rows = np.ascontiguousarray(values.astype(dtype, copy=False))
    found = [xxhash.xxh3_64_intdigest(row.tobytes()) for row in rows]
    return np.array(found, np.uint64)


def _read_labels(given: Sequence[Any], kind: Any) -> tuple[Any, Faults]:
    """Return `given` (n,) as an Arrow array of type `kind`, and the reasons why some of
    the labels are invalid. The rules are the same as for text data."""
    labels, kinds = column_of_mixed([_plain(label) for label in given])
    batch = RawBatch("", np.arange(len(labels)), {LABEL: labels}, {LABEL: kinds})
    faults = Faults()
    return read_label(batch, LABEL, kind, faults), faults


def _plain(label: Any) -> Any:
    """Return a label with bytes decoded and surrounding whitespace stripped. (HDF5
    stores strings as bytes.) Bytes that are not UTF-8 become surrogates, so the label
    is rejected later."""
    if isinstance(label, bytes):
        label = label.decode(errors="surrogateescape")
    return str(label).strip() if isinstance(label, (str, bool)) else label


def label_names_of(source: ArraySource, task: Task) -> list[str]:
    """Return the distinct valid label names of a source, sorted by `ordered_names`. If
    the labels of the task are not names, return an empty list."""
    if task.label_type is None or not pa.types.is_string(task.label_type):
        return []
    labels, faults = _read_labels(list(source.labels()), task.label_type)
    good = np.setdiff1d(np.arange(len(labels)), list(faults.reasons))
    return ordered_names(pc.unique(labels.take(pa.array(good))).to_pylist())
