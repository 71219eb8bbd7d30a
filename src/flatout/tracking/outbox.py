"""What MLflow is to know of a run, on disk first, and how much of it was sent."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from mlflow.entities import Metric

logger = logging.getLogger(__name__)

ARTIFACTS = (
    "train_report.json",
    "train_history.csv",
    "confusion_matrix.json",
    "guard.json",
)
UNSENT = "unsent"
RECORD_SUFFIX = ".run.json"


@dataclass
class RunRecord:
    """All that MLflow is to know of a run but its points, and how much it knows."""

    tracking_uri: str
    experiment: str
    name: str
    artifact_location: str | None = None
    run_id: str | None = None
    status: str = "RUNNING"
    start_ms: int = field(default_factory=lambda: int(time.time() * 1000))
    end_ms: int | None = None
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    settled: dict[str, str] = field(default_factory=dict)
    """Tags of what `auto` came to, as the engine notes it when training starts."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Final figures."""
    datasets: list[dict[str, str]] = field(default_factory=list)
    """Inputs: name, digest, context, source, rows."""
    trials: list[dict[str, Any]] = field(default_factory=list)
    """Nested runs: name, status, params, metrics, start_ms, end_ms."""
    sent_bytes: int = 0
    """Length of the part of the points' file that was sent."""
    last_step: int = 0
    """Last step that was sent."""
    sent_steps: dict[str, int] = field(default_factory=dict)
    """The same of each metric."""
    first_line: str = ""
    """Of the points' file: its time tells a file from the one that it replaced."""
    known_bytes: int = 0
    """Length of the points' file when the run last went on after an interruption."""
    known_steps: dict[str, int] = field(default_factory=dict)
    """Last step of each metric in that part: what comes again later is not sent."""
    sent_params: int = 0
    sent_tags: dict[str, str] = field(default_factory=dict)
    sent_datasets: int = 0
    sent_trials: int = 0
    goes_on: bool = False
    """The store is to be told that a run which it knows as ended runs again."""
    complete: bool = False
    """The store has all of a run that has ended."""
    delivered: list[str] = field(default_factory=list)
    """URIs of the stores that have all of it."""

    def is_lacked_by(self, tracking_uri: str | None) -> bool:
        """None: the store that the run was meant for."""
        have = {None, self.tracking_uri, *self.delivered}
        return not self.complete or tracking_uri not in have


class Outbox:
    """A run's points (`<name>.jsonl`) and record (`<name>.run.json`) on disk."""

    def __init__(self, points: Path, record: RunRecord) -> None:
        self.points = points
        self.record = record
        self._saving = threading.Lock()

    @classmethod
    def load(cls, points: Path) -> Outbox | None:
        """The outbox of an earlier run; None where there is none that can be read."""
        try:
            text = record_path(points).read_text(encoding="utf-8")
            return cls(points, RunRecord(**json.loads(text)))
        except (OSError, ValueError, TypeError):
            return None

    def save(self) -> None:
        """Write the record, whole or not at all. A full disk is no reason to stop."""
        path = record_path(self.points)
        text = json.dumps(asdict(self.record), indent=1)
        written = path.with_suffix(".tmp")
        try:
            with self._saving:
                path.parent.mkdir(parents=True, exist_ok=True)
                written.write_text(text, encoding="utf-8")
                os.replace(written, path)
        except OSError as error:
            logger.warning("%s could not be written: %s", path, error)

    def new_points(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Whole lines not sent yet, each with the file's length up to its end."""
        if not self.points.is_file():
            return
        with self.points.open("rb") as file:
            self._notice_new_file(first_line(file))
            file.seek(self.record.sent_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield file.tell(), _parsed(line)

    def _notice_new_file(self, first: str) -> None:
        """A training that started anew, in this run too, has emptied the file: all of
        it is new, but the steps that the store has."""
        record = self.record
        if record.first_line not in ("", first):
            record.sent_bytes = record.known_bytes = 0
            record.known_steps = dict(record.sent_steps)
        record.first_line = first

    def note_sent(self, metrics: list[Metric], end: int) -> None:
        """The store has `metrics`, and with them the file up to `end`."""
        record = self.record
        record.sent_bytes = end
        for metric in metrics:
            before = record.sent_steps.get(metric.key, -1)
            record.sent_steps[metric.key] = max(before, metric.step)
        record.last_step = max([record.last_step, *record.sent_steps.values()])
        self.save()

    def note_known_points(self) -> None:
        """A training that goes on repeats the steps after its checkpoint."""
        record, sent = self.record, self.record.sent_bytes
        record.sent_bytes = 0
        for end, point in self.new_points():
            record.known_bytes = end
            for metric in metrics_of(point):
                before = record.known_steps.get(metric.key, -1)
                record.known_steps[metric.key] = max(before, metric.step)
        record.sent_bytes = sent

    def readdress(
        self, tracking_uri: str, artifact_location: str | None = None
    ) -> None:
        """Send the whole run to a store that knows nothing of it yet."""
        record = self.record
        record.tracking_uri, record.artifact_location = tracking_uri, artifact_location
        record.run_id, record.sent_tags, record.goes_on = None, {}, False
        record.sent_datasets = record.sent_trials = 0
        record.sent_bytes, record.sent_params, record.sent_steps = 0, 0, {}
        if not record.known_bytes:
            record.known_steps = {}

    def set_aside(self) -> None:
        """Move both files where they wait for `kedro flatout sync`."""
        stamp = f"{self.record.start_ms}-{self.points.stem}"
        folder = self.points.parent / UNSENT / stamp
        folder.mkdir(parents=True, exist_ok=True)
        beside = [self.points.with_name(name) for name in ARTIFACTS]
        for path in (self.points, record_path(self.points), *beside):
            if path.exists():
                os.replace(path, folder / path.name)


def record_path(points: Path) -> Path:
    return points.with_suffix(RECORD_SUFFIX)


def set_aside_beside(points: Path) -> list[Path]:
    """Points' files of the runs that `Outbox.set_aside` moved, oldest first."""
    records = (points.parent / UNSENT).glob(f"*/*{RECORD_SUFFIX}")
    names = [path.with_name(path.name.removesuffix(RECORD_SUFFIX)) for path in records]
    return sorted(path.with_suffix(".jsonl") for path in names)


def first_line(file: IO[bytes]) -> str:
    """Empty while it is not written whole."""
    line = file.readline()
    return line.decode(errors="replace") if line.endswith(b"\n") else ""


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        point = json.loads(line)
    except ValueError:
        return {}
    return point if isinstance(point, dict) else {}


def begin(points: Path, record: RunRecord, *, goes_on: bool) -> Outbox:
    """Outbox of a run that starts now.

    With `goes_on` the run continues the one that the folder holds, if that did not
    finish; otherwise what MLflow lacks of that one is set aside.
    """
    earlier = Outbox.load(points)
    if earlier and goes_on and earlier.record.status != "FINISHED":
        kept = earlier.record
        kept.status, kept.end_ms, kept.complete = "RUNNING", None, False
        kept.tags, kept.goes_on, kept.delivered = record.tags, True, []
        if kept.tracking_uri != record.tracking_uri:
            earlier.readdress(record.tracking_uri, record.artifact_location)
        earlier.note_known_points()
        return earlier
    if earlier and not earlier.record.complete:
        earlier.set_aside()
    elif earlier:
        points.unlink(missing_ok=True)
    elif points.exists():  # of a training outside Kedro: keep it, send nothing of it
        record.sent_bytes = points.stat().st_size
        with points.open("rb") as file:
            record.first_line = first_line(file)
    return Outbox(points, record)


def metrics_of(point: dict[str, Any]) -> list[Metric]:
    """Of a point as the engine writes it; nothing of any other line."""
    values = point.get("metrics")
    if not isinstance(values, dict) or "step" not in point:
        return []
    time_ms = int(point.get("time_s", time.time()) * 1000)
    return [
        Metric(name, float(value), time_ms, int(point["step"]))
        for name, value in values.items()
        if isinstance(value, (int, float))
    ]
