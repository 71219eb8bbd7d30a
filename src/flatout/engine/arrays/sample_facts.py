"""What is known of raw samples after one pass: their hashes, labels and faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from flatout.engine.arrays.sources import ArraySource, Window
from flatout.engine.tasks import Task

FINE = 1e-3
"""Share of what a value varies by, that a step between numbers must not exceed."""


@dataclass(frozen=True)
class SampleFacts:
    """Of all rows: (N,) each."""

    hashes: npt.NDArray[np.uint64]
    labels: npt.NDArray[Any]
    rejected: list[dict[str, Any]]
    good: npt.NDArray[np.bool_]
    shape: tuple[int, ...] | None
    """Of a sample; None where none can be used."""
    dtype: npt.DTypeLike
    """Bytes if all files have bytes; fp64 if fp32 would make equal what differs, as of
    Unix times; else fp32."""


def first_pass(source: ArraySource, task: Task) -> SampleFacts:
    """Of all windows of `source`. Raises ArraysError."""
    hashes, labels, good = [], [], []
    rejected: list[dict[str, Any]] = []
    shape: tuple[int, ...] | None = None
    dtypes: set[Any] = set()
    spread = _Spread()
    for window in source.windows():
        if shape is None and len(window.faults) < len(window.values):
            shape = window.values.shape[1:]
        faults = _faults(window, shape, task)
        rows = len(window.values)
        if len(faults) < rows:
            dtypes.add(window.values.dtype)
            spread.add(np.delete(window.values, list(faults), axis=0))
        hashes.append(_hashes(window.values, stored_as(window.values.dtype)))
        good.append(~np.isin(np.arange(rows), list(faults)))
        labels.append(_labels(window, task))
        rejected += [
            rejected_row(*window.place(row), why, "")
            for row, why in sorted(faults.items())
        ]
    dtype: Any = np.uint8 if dtypes == {np.dtype(np.uint8)} else np.float32
    dtype = np.float64 if spread.needs_fp64 else dtype
    if {stored_as(found) for found in dtypes} - {np.dtype(dtype)}:
        # Equal numbers are equal samples, whatever stores them.
        hashes = [_hashes(w.values, dtype) for w in source.windows()]
    return SampleFacts(
        _joined(hashes, np.uint64),
        _joined(labels, object),
        rejected,
        _joined(good, bool),
        shape,
        dtype,
    )


class _Spread:
    """Least and greatest of each value of the samples, as far as they are fp64."""

    def __init__(self) -> None:
        self._low: Any = np.inf
        self._high: Any = -np.inf

    def add(self, values: npt.NDArray[Any]) -> None:
        """Samples (n, ...) without a fault."""
        if values.dtype == np.float64 and len(values):
            self._low = np.minimum(self._low, values.min(0))
            self._high = np.maximum(self._high, values.max(0))

    @property
    def needs_fp64(self) -> bool:
        """Whether the steps of fp32 at the greatest of a value are no small part of
        what it varies by."""
        spread = np.maximum(self._high - self._low, 0)
        largest = np.maximum(np.abs(self._high), np.abs(self._low))
        step = np.finfo(np.float32).eps * np.where(spread > 0, largest, 0)
        return bool((step > FINE * spread).any())


def _joined(parts: list[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _faults(
    window: Window, shape: tuple[int, ...] | None, task: Task
) -> dict[int, str]:
    """Row of the window -> why it cannot be used."""
    found = window.faults_for(shape)
    if task.label_type is not None:
        names = pa.types.is_string(task.label_type)
        read = name_of_class if names else _number
        told = window.labels or [None] * len(window.values)
        for row, label in enumerate(told):
            if read(label) is None:
                is_there = not names and name_of_class(label) is not None
                why = "the label is no finite number" if is_there else "no label"
                found.setdefault(row, why)
    return found


def stored_as(dtype: Any) -> Any:
    """What numbers of a file are kept as if fp32 can hold them."""
    return dtype if dtype == np.uint8 else np.dtype(np.float32)


def _hashes(values: npt.NDArray[Any], dtype: Any) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):  # of samples with a fault
        rows = np.ascontiguousarray(values.astype(dtype, copy=False))
    return np.array(
        [xxhash.xxh3_64_intdigest(row.tobytes()) for row in rows], np.uint64
    )


def _labels(window: Window, task: Task) -> npt.NDArray[Any]:
    count = len(window.values)
    told = window.labels or [None] * count
    if task.label_type is None or pa.types.is_string(task.label_type):
        return np.array([name_of_class(label) or "" for label in told], dtype=object)
    numbers = (_number(label) for label in told)
    return np.array([np.nan if n is None else n for n in numbers], np.float64)


def name_of_class(label: Any) -> str | None:
    """3.0 is called 3."""
    if label is None or label != label:  # noqa: PLR0124 - NaN
        return None
    if isinstance(label, bytes):
        label = label.decode(errors="replace")
    whole = isinstance(label, float) and label.is_integer()
    return str(int(label)) if whole else str(label).strip() or None


def _number(label: Any) -> float | None:
    try:
        found = float(label)
    except (TypeError, ValueError):
        return None
    return found if np.isfinite(found) else None


def rejected_row(source: str, row: int, reason: str, excerpt: Any) -> dict[str, Any]:
    """As REJECTED_SCHEMA has it."""
    return {
        "source": source,
        "row": row,
        "reason": reason,
        "excerpt": str(excerpt),
    }
