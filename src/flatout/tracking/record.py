"""Record of a run for MLflow: a folder in which the hooks write the file `run.json`."""

from __future__ import annotations

import json
import logging
import shutil
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from flatout.engine.files.atomic_write import write_text
from flatout.engine.files.calibration import CALIBRATION
from flatout.tracking.store import process_lives

SENT = "sent.json"


@dataclass
class Sent:
    """The parts of a run that a store has received, as kept in `sent.json`."""

    uri: str
    run_id: str | None = None
    steps: dict[str, int] = field(default_factory=dict)
    """The last step that the store has received for each metric."""
    model: str | None = None
    """URI of the logged model."""
    ended: list[Any] | None = None
    """Status and end time (ms), set once the store has all data of the run."""
    fault: str | None = None
    """The reason why the last delivery failed."""

    @classmethod
    def load(cls, folder: Path, uri: str) -> Sent:
        """Return the state that is stored in `folder` for the store at `uri`. If there
        is none, return an empty state."""
        try:
            known = json.loads((folder / SENT).read_text(encoding="utf-8"))
            found = cls(**known)
        except (OSError, ValueError, TypeError, AttributeError):
            return cls(uri)
        return found if found.uri == uri else cls(uri)

    def save(self, folder: Path) -> None:
        write_text(folder / SENT, json.dumps(asdict(self)))


logger = logging.getLogger(__name__)

RECORD = "run.json"
POINTS = "points.jsonl"
DROPPED = "DROPPED"
"""Status of a run that is not sent to MLflow, because training had already finished or
the run failed before its first node."""

ARTIFACTS = (
    "train_report.json",
    "train_history.csv",
    "evaluation_report.json",
    "class_metrics.csv",
    "confusion_matrix.json",
    "wrong_images.png",
    "suspect_rows.md",
    "guard.json",
    "split_report.json",
)


@dataclass(frozen=True)
class SavedModel:
    """Description of a saved model for MLflow. All values can be stored as JSON."""

    folder: str
    """Folder written by `save_pretrained`."""
    saved_ns: int
    """Modification time of the newest file. A newer file means that the model was
    replaced."""
    task: str | None
    """Name of the transformers pipeline, or None for models of arrays or images."""
    registered_model: str | None
    """Name of the registered model that gets a new version, or None."""
    validation_loss: float
    token_key: str
    """Identifies the tokens. Only versions trained on the same tokens are compared."""
    setting: str | None = None
    """Digest of the parameters that determine training, except for the seed."""
    seed: int | None = None
    dtype: str | None = None
    """The dtype of samples, or None for models of texts and in older records."""
    shape: list[int] | None = None
    """The shape of a sample, or None for models of texts and in older records."""
    outputs: dict[str, str] = field(default_factory=dict)
    """The columns of a prediction for a sample, and their Arrow types."""

    @classmethod
    def of(cls, described: dict[str, Any]) -> SavedModel:
        """Return the model with the fields `described`, which another version of
        flatout may have written. Unknown fields are ignored."""
        known = {one.name for one in fields(cls)} & {*described}
        return cls(**{name: described[name] for name in known})

    @property
    def tags(self) -> dict[str, str]:
        names = ("validation_loss", "token_key", "setting", "seed")
        found = {name: getattr(self, name) for name in names}
        return {name: str(value) for name, value in found.items() if value is not None}


def newest_ns(folder: Path) -> int:
    """Return the modification time (ns) of the newest file in `folder`, or 0 if there
    is none. The calibration and model card are ignored, because they are written
    later."""
    later = (CALIBRATION, "README.md")
    files = (f for f in folder.glob("*") if f.is_file() and f.name not in later)
    return max((f.stat().st_mtime_ns for f in files), default=0)


@dataclass
class RunRecord:
    """All data of a run for MLflow except its metric points."""

    tracking_uri: str
    experiment: str
    name: str
    artifact_location: str | None = None
    reporting: str | None = None
    """Folder of the reports to send as artifacts."""
    points: str | None = None
    """File with the metric points of the run, or None if the run does not train."""
    status: str = "RUNNING"
    start_ms: int = field(default_factory=lambda: int(time.time() * 1000))
    end_ms: int | None = None
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    """Final values of metrics that have a curve or by which users sort runs."""
    figures: dict[str, float] = field(default_factory=dict)
    """All other final metrics, shown as a table in the run's description."""
    trials: list[dict[str, Any]] = field(default_factory=list)
    """Nested runs: dicts as returned by `outcomes.nested_runs`."""
    model: dict[str, Any] | None = None
    """Fields of a SavedModel."""
    baseline: dict[str, Any] | None = None
    """Earlier run to compare with: a dict with name, rate and healthy_low_pct."""
    system_metrics: bool = False


class RunFolder:
    """The folder of a run's record. Only the run's process writes `run.json`, and only
    the tracking program writes the other files."""

    def __init__(self, path: Path, record: RunRecord) -> None:
        self.path = path
        self.record = record
        self.earlier: RunFolder | None = None
        """The last run that used the same file of points, if there is one."""

    @classmethod
    def load(cls, path: Path) -> RunFolder | None:
        """Return the run in `path`, or None if there is no readable record."""
        try:
            stored = json.loads((path / RECORD).read_text(encoding="utf-8"))
            known = {f.name for f in fields(RunRecord)} & {*stored}
            record = RunRecord(**{name: stored[name] for name in known})
            if record.points:
                record.points, record.reporting = _found_at(path, record.points)
            return cls(path, record)
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def save(self) -> None:
        """Write the record atomically. Errors are logged and do not end the run."""
        try:
            text = json.dumps(asdict(self.record), indent=1)
            write_text(self.path / RECORD, text)
        except Exception as error:
            logger.warning("%s could not be written: %s", self.path / RECORD, error)

    def is_complete(self) -> bool:
        """Return whether the run has ended and the store has all of its data."""
        record = self.record
        ended = Sent.load(self.path, record.tracking_uri).ended
        if record.end_ms is not None:
            return record.status == DROPPED or (ended or [""])[-1] == record.end_ms
        return bool(ended) and not process_lives(record.tags)

    def end(self, status: str) -> None:
        self.record.status, self.record.end_ms = status, int(time.time() * 1000)
        self.save()

    def artifacts(self) -> list[Path]:
        """Return the paths of the run's reports. Files of earlier runs are left out."""
        folder, start_s = self.record.reporting, self.record.start_ms / 1000
        named = [Path(folder, name) for name in ARTIFACTS] if folder else []
        return [p for p in named if p.is_file() and p.stat().st_mtime >= start_s]

    def set_aside(self) -> None:
        """Copy points and reports to this folder before another run overwrites them."""
        record = self.record
        for file in self.artifacts():
            if file.parent != self.path:
                shutil.copy2(file, self.path)
        if record.points and Path(record.points).is_file():
            shutil.copy2(record.points, self.path / POINTS)
        record.points = record.points and str(self.path / POINTS)
        record.reporting = str(self.path)
        self.save()

    def forget_earlier(self) -> None:
        """Delete the folders of earlier runs that used the same file of points, if
        MLflow has all of their data."""
        for other in run_folders(self.path.parent):
            is_older = other.record.start_ms < self.record.start_ms
            alike = other.record.points == self.record.points
            if is_older and alike and other.is_complete():
                shutil.rmtree(other.path, ignore_errors=True)


def _found_at(folder: Path, points: str) -> tuple[str, str]:
    """Return the current paths of the run's points and of its reports. The data folder
    may have been moved since the path `points` was recorded."""
    is_aside = Path(points).parent.name == folder.name
    place = folder if is_aside else folder.parent.parent
    return str(place / Path(points).name), str(place)


def run_folders(parent: Path) -> list[RunFolder]:
    """Return the runs in `parent`, oldest first. These are the latest runs, and earlier
    runs that MLflow may not have received completely."""
    loaded = [RunFolder.load(file.parent) for file in parent.glob(f"*/{RECORD}")]
    found = [f for f in loaded if f and f.record.status != DROPPED]
    return sorted(found, key=lambda f: f.record.start_ms)


def begin(parent: Path, record: RunRecord, *, goes_on: bool) -> RunFolder:
    """Return the folder in `parent` for a new run.

    If `goes_on` is True and the last run with the same file of points did not finish,
    that run is continued. Otherwise, data of earlier runs that MLflow has not received
    yet is copied first, because the new run overwrites it.
    """
    earlier = [f for f in run_folders(parent) if f.record.points == record.points]
    if earlier and goes_on and earlier[-1].record.status != "FINISHED":
        return _continued(earlier[-1], record)
    for folder in earlier:
        if not folder.is_complete():
            folder.set_aside()
    folder = RunFolder(parent / f"{record.start_ms}_{record.name}", record)
    folder.earlier = earlier[-1] if earlier else None
    folder.save()
    return folder


def _continued(folder: RunFolder, now: RunRecord) -> RunFolder:
    kept = folder.record
    kept.status, kept.end_ms, kept.tags = "RUNNING", None, now.tags
    kept.tracking_uri, kept.baseline = now.tracking_uri, None
    kept.artifact_location = now.artifact_location
    folder.save()
    return folder
