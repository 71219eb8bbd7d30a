"""A run's live points on disk, for whatever forwards them to a tracking store."""

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
    """Live points, a JSON line each, flushed at once. Whatever forwards them to a
    tracking store reads this file: a store that is slow or gone costs no step."""

    path: Path
    enabled: bool = True

    _written: set[tuple[int, str]] = field(default_factory=set)
    """(step, metric) of points that an interrupted session wrote already."""
    _waiting: list[str] = field(default_factory=list)

    def start(self, start_step: int) -> None:
        """A new run begins with an empty file. A resumed one goes on in it, and points
        that are there already are not written again."""
        if not self.enabled:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        if start_step == 0 or not lines:
            self.path.write_text("")
            return
        torn = len(lines.pop())  # a line that a kill has cut short
        os.truncate(self.path, self.path.stat().st_size - torn)
        points = [parse_point(line) for line in lines]
        for point in points:
            names = point.get("metrics", {})
            self._written |= {(point["step"], name) for name in names}
        if damaged := sum(not point for point in points):
            logger.warning("%s: %d damaged lines are skipped", self.path, damaged)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        # Whole points: the rates that a warm-up lacked would come after later steps.
        repeated = any((step, name) in self._written for name in metrics)
        if metrics and not repeated:
            self._append({"step": step, "metrics": metrics})

    def note_resolved(self, step: int, resolved: dict[str, Any]) -> None:
        """What runs from `step` on, all `auto` being resolved: known of a run that is
        killed before its report, too."""
        self._append({"step": step, "metrics": {}, "settled": resolved})

    def _append(self, line: dict[str, Any]) -> None:
        if self.enabled:
            self._waiting.append(json.dumps({**line, "time_s": time.time()}) + "\n")
            self._write_waiting()

    def _write_waiting(self) -> None:
        """A full disk costs no run: points wait until there is room."""
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a") as file:
                file.writelines(self._waiting)
            self._waiting.clear()
        except OSError as error:
            if len(self._waiting) == 1:
                logger.warning("%s cannot be written now: %s", self.path, error)
            with suppress(OSError):
                os.truncate(self.path, size)  # no part of a line stays


def parse_point(line: bytes) -> dict[str, Any]:
    """A line of the file; empty where the line is damaged."""
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
