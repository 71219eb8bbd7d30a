"""Write live metrics to a file. Other programs send them to a tracking store."""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


@dataclass
class MetricsFile:
    """A JSON Lines file of live metrics, flushed after each line. Other programs send
    them to a tracking store, so that a slow store does not delay training."""

    path: Path
    enabled: bool = True

    _written: set[tuple[int, str]] = field(default_factory=set)
    """The (step, metric) pairs that an earlier session has already written."""
    _waiting: list[str] = field(default_factory=list)

    def start(self, start_step: int) -> None:
        """Create an empty file for a new run. For a resumed run, append to the existing
        file, without repeating points that it already contains."""
        if not self.enabled:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        if start_step == 0 or not lines:
            self.path.write_text("")
            return
        torn = len(lines.pop())  # a partial last line, if the process was killed
        os.truncate(self.path, self.path.stat().st_size - torn)
        points = [parse_point(line) for line in lines]
        for point in points:
            names = point.get("metrics", {})
            self._written |= {(point["step"], name) for name in names}
        if damaged := sum(not point for point in points):
            logger.warning("%s: %d damaged lines are skipped", self.path, damaged)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        # Skip the whole point, even if the file lacks only its throughput (because of a
        # warm-up). Metrics that are appended later would be out of order.
        repeated = any((step, name) in self._written for name in metrics)
        if metrics and not repeated:
            self._append({"step": step, "metrics": metrics})

    def note_resolved(self, step: int, resolved: dict[str, Any]) -> None:
        """Write the settings that apply from `step` on, with each `auto` resolved. They
        are then known even if the run is killed before it writes its report."""
        self._append({"step": step, "metrics": {}, "settled": resolved})

    def _append(self, line: dict[str, Any]) -> None:
        """Write a line. If the disk is full, the line is kept for the next call."""
        if not self.enabled:
            return
        self._waiting.append(json.dumps({**line, "time_s": time.time()}) + "\n")
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a") as file:
                file.writelines(self._waiting)
            self._waiting.clear()
        except OSError as error:
            if len(self._waiting) == 1:
                logger.warning("%s cannot be written now: %s", self.path, error)
            with suppress(OSError):
                os.truncate(self.path, size)  # remove a partial line


def read_points(path: Path) -> list[dict[str, Any]]:
    """Return the points in a file, without damaged lines, or [] if there is no file."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return [point for point in map(parse_point, lines) if point]


def parse_point(line: bytes) -> dict[str, Any]:
    """Parse a line of a metrics file. Return an empty dict if the line is damaged."""
    try:
        point = json.loads(line)
    except ValueError:
        return {}
    sound = (
        isinstance(point, dict)
        and isinstance(point.get("step"), int)
        and isinstance(point.get("metrics"), dict)
    )
    return point if sound else {}
