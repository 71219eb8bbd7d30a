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
    """Bytes where all files have bytes, else fp32."""


def first_pass(source: ArraySource, task: Task) -> SampleFacts:
    """Of all windows of `source`. Raises ArraysError."""
    hashes, labels, good = [], [], []
    rejected: list[dict[str, Any]] = []
    shape: tuple[int, ...] | None = None
    dtypes: set[Any] = set()
    for window in source.windows():
        if shape is None and len(window.faults) < len(window.values):
            shape = window.values.shape[1:]
        faults = _faults(window, shape, task)
        rows = len(window.values)
        if len(faults) < rows:
            dtypes.add(window.values.dtype)
        hashes.append(_hashes(window.values))
        good.append(~np.isin(np.arange(rows), list(faults)))
        labels.append(_labels(window, task))
        rejected += [
            rejected_row(*window.place(row), why, "")
            for row, why in sorted(faults.items())
        ]
    if len(dtypes) > 1:  # equal numbers are equal samples, whatever stores them
        hashes = [_hashes(w.values.astype(np.float32)) for w in source.windows()]
    return SampleFacts(
        _joined(hashes, np.uint64),
        _joined(labels, object),
        rejected,
        _joined(good, bool),
        shape,
        np.uint8 if dtypes == {np.dtype(np.uint8)} else np.float32,
    )


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


def _hashes(values: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    rows = np.ascontiguousarray(values)
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
        "line": None,
        "reason": reason,
        "excerpt": str(excerpt),
    }
