"""What MLflow is to know of a run, on disk first, and how much of it was sent."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from copy import copy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.engine.files.atomic_write import write_text
from flatout.engine.parameters.secrets import without_password

if TYPE_CHECKING:
    from mlflow.entities import Metric

logger = logging.getLogger(__name__)

ARTIFACTS = (
    "train_report.json",
    "train_history.csv",
    "evaluation_report.json",
    "class_metrics.csv",
    "confusion_matrix.json",
    "wrong_images.png",
    "wrong_rows.jsonl",
    "guard.json",
    "split_report.json",
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
    """Final values of what has a curve, and what runs are sorted by."""
    figures: dict[str, float] = field(default_factory=dict)
    """All other final figures: a table in the run's description, no charts."""
    datasets: list[dict[str, str]] = field(default_factory=list)
    """Inputs: name, digest, context, source, rows."""
    trials: list[dict[str, Any]] = field(default_factory=list)
    """Nested runs: name, status, params, metrics, tags, start_ms, end_ms."""
    sent_steps: dict[str, int] = field(default_factory=dict)
    """Of each metric the last step that the store has. All else that it has the store
    is asked for (`sending.Sender`)."""
    complete: bool = False
    """The store has all of a run that has ended."""
    delivered: list[str] = field(default_factory=list)
    """URIs of the stores that have all of it."""

    def snapshot(self) -> dict[str, Any]:
        """JSON values. Each field is copied in one piece, because both the run's
        process and the thread that sends add keys."""
        return {name: copy(value) for name, value in vars(self).items()}

    def is_lacked_by(self, tracking_uri: str | None) -> bool:
        """None: the store that the run was meant for."""
        have = {None, self.tracking_uri, *self.delivered}
        return not self.complete or tracking_uri not in have


class Outbox:
    """A run's points (`<name>.jsonl`) and record (`<name>.run.json`) on disk."""

    def __init__(self, points: Path, record: RunRecord) -> None:
        self.points = points
        self.record = record
        self._lock = threading.RLock()
        """Who saves holds it from reading the record until the file is written, so
        that no older record replaces a newer one."""

    @classmethod
    def load(cls, points: Path) -> Outbox | None:
        """The outbox of an earlier run; None where there is none that can be read."""
        try:
            stored = json.loads(record_path(points).read_text(encoding="utf-8"))
            known = {f.name for f in fields(RunRecord)}  # earlier versions had more
            return cls(points, RunRecord(**{k: stored[k] for k in known & {*stored}}))
        except (OSError, ValueError, TypeError):
            return None

    def save(self) -> None:
        """Write the record, whole or not at all. No fault here may end a run."""
        path = record_path(self.points)
        try:
            with self._lock:
                text = json.dumps(self.record.snapshot(), indent=1)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, text)
        except Exception as error:
            logger.warning("%s could not be written: %s", path, error)

    def note_sent(self, metrics: list[Metric]) -> None:
        """The store has `metrics`, which come in the order of their steps."""
        with self._lock:
            self.record.sent_steps |= {metric.key: metric.step for metric in metrics}
            self.save()

    def readdress(
        self, tracking_uri: str, artifact_location: str | None = None
    ) -> None:
        """Send the whole run to a store that knows nothing of it yet."""
        record = self.record
        record.tracking_uri, record.artifact_location = tracking_uri, artifact_location
        record.run_id, record.sent_steps = None, {}

    def warn_of_rest(self) -> None:
        """The store did not take all of a run that has ended."""
        logger.warning(
            "MLflow at %s does not have all of this run. The rest is in %s; "
            "`kedro flatout sync` sends it.",
            without_password(self.record.tracking_uri),
            self.points.parent,
        )

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


def begin(points: Path, record: RunRecord, *, goes_on: bool) -> Outbox:
    """Outbox of a run that starts now.

    With `goes_on` the run continues the one that the folder holds, if that did not
    finish; otherwise what MLflow lacks of that one is set aside.
    """
    earlier = Outbox.load(points)
    if earlier and goes_on and earlier.record.status != "FINISHED":
        kept = earlier.record
        kept.status, kept.end_ms, kept.complete = "RUNNING", None, False
        kept.tags, kept.delivered = record.tags, []
        if kept.tracking_uri != record.tracking_uri:
            earlier.readdress(record.tracking_uri, record.artifact_location)
        return earlier
    if earlier and not earlier.record.complete:
        earlier.set_aside()
    elif earlier:
        points.unlink(missing_ok=True)
    elif points.exists() and not goes_on:  # of a training outside Kedro
        os.replace(points, points.with_suffix(f".earlier{points.suffix}"))
    return Outbox(points, record)
