"""New lines of points, converted to MLflow's metrics in lots of a valid size."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from mlflow.entities import Metric

from flatout.engine.train.recording.metrics_file import parse_point

TESTED = "test_"
MAX_BATCH_METRICS = 1000

Item = TypeVar("Item")


class Tail:
    """Complete lines of a growing file, which a training may also empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.read_bytes = 0
        """Number of bytes of the file that were read so far."""
        self._first_line = b""
        """Its time distinguishes a file from the one that it replaced."""

    def new(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield unread points, each with the file's length up to its end."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            first = file.readline()
            if first != self._first_line:
                self._first_line, self.read_bytes = first, 0
            file.seek(self.read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield file.tell(), parse_point(line)


def mlflow_metrics(point: dict[str, Any]) -> list[Metric]:
    """Return the metrics of an engine's point; empty for a damaged line, and for the
    test split, which is evaluated only once."""
    time_ms = int(point.get("time_s", time.time()) * 1000)
    return [
        Metric(name, float(value), time_ms, int(point["step"]))
        for name, value in point.get("metrics", {}).items()
        if isinstance(value, (int, float)) and not name.startswith(TESTED)
    ]


def batched(items: Iterable[Item], size: int) -> list[list[Item]]:
    rows = list(items)
    return [rows[start : start + size] for start in range(0, len(rows), size)]
