"""What MLflow is to know of a run: a folder with `run.json`, which the hooks write."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from flatout.engine.files.atomic_write import write_text
from flatout.tracking.sent import Sent
from flatout.tracking.store import process_lives

logger = logging.getLogger(__name__)

RECORD = "run.json"
POINTS = "points.jsonl"
DROPPED = "DROPPED"
"""Status of a run that trained nothing, because the training was finished already."""

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


@dataclass(frozen=True)
class SavedModel:
    """What MLflow is told of a saved model; JSON values."""

    folder: str
    """As `save_pretrained` leaves it."""
    saved_ns: int
    """Time of its newest file: of a later one, another training has saved its own."""
    example: str
    """A text; of samples of one shape a file with an array (...)."""
    task: str | None
    """The pipeline's tag; None: a model of samples of one shape."""
    registered_model: str | None
    """Name of which a version is made."""
    validation_loss: float
    token_key: str
    """Versions compete if they were trained and validated on the same tokens."""

    @property
    def tags(self) -> dict[str, str]:
        return {
            "validation_loss": str(self.validation_loss),
            "token_key": self.token_key,
        }


def newest_ns(folder: Path) -> int:
    """Time of the newest file in `folder`; 0 without any."""
    times = (f.stat().st_mtime_ns for f in folder.glob("*") if f.is_file())
    return max(times, default=0)


@dataclass
class RunRecord:
    """All that MLflow is to know of a run but its points."""

    tracking_uri: str
    experiment: str
    name: str
    registry_uri: str | None = None
    artifact_location: str | None = None
    reporting: str | None = None
    """Folder of the reports that the run sends."""
    points: str | None = None
    """File of the run's points; None: the run does not train."""
    run_id: str | None = None
    """Of a run that MLflow has already."""
    status: str = "RUNNING"
    start_ms: int = field(default_factory=lambda: int(time.time() * 1000))
    end_ms: int | None = None
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    """Final values of what has a curve, and what runs are sorted by."""
    figures: dict[str, float] = field(default_factory=dict)
    """All other final figures: a table in the run's description."""
    datasets: list[dict[str, str]] = field(default_factory=list)
    """Inputs: name, digest, context, source, rows."""
    trials: list[dict[str, Any]] = field(default_factory=list)
    """Nested runs: name, status, params, metrics, tags, start_ms, end_ms, points."""
    model: dict[str, Any] | None = None
    """Fields of a SavedModel."""
    baseline: dict[str, Any] | None = None
    """Earlier run of the same work: name, rate, healthy_low_pct."""
    system_metrics: bool = False


class RunFolder:
    """A run's record on disk. Only the run's process writes `run.json`; only the
    tracking program writes all else."""

    def __init__(self, path: Path, record: RunRecord) -> None:
        self.path = path
        self.record = record
        self.earlier: RunFolder | None = None
        """The finished training of the same points, if there is one."""

    @classmethod
    def load(cls, path: Path) -> RunFolder | None:
        """None if there is no record that can be read."""
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
        """Write the record, whole or not at all. No fault here may end a run."""
        try:
            text = json.dumps(asdict(self.record), indent=1)
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(self.path / RECORD, text)
        except Exception as error:
            logger.warning("%s could not be written: %s", self.path / RECORD, error)

    def is_complete(self, uri: str | None = None) -> bool:
        """Whether the store at `uri`, or any, has all of a run that ended."""
        stores = Sent.stores(self.path)
        asked = stores.values() if uri is None else filter(None, [stores.get(uri)])
        ends = [sent.ended[1] for sent in asked if sent.ended]
        record = self.record
        if record.end_ms is not None:
            return record.status == DROPPED or record.end_ms in ends
        return bool(ends) and not process_lives(record.tags)

    def end(self, status: str) -> None:
        self.record.status, self.record.end_ms = status, int(time.time() * 1000)
        self.save()

    def artifacts(self) -> list[Path]:
        """Reports of the run; none that an earlier run left."""
        folder, start_s = self.record.reporting, self.record.start_ms / 1000
        named = [Path(folder, name) for name in ARTIFACTS] if folder else []
        named.append(self.path / "environment.json")
        return [p for p in named if p.is_file() and p.stat().st_mtime >= start_s]

    def set_aside(self) -> None:
        """Keep copies of points and reports, before another run writes its own."""
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
        """Remove the folders of earlier runs of the same points that MLflow has."""
        for other in run_folders(self.path.parent):
            is_older = other.record.start_ms < self.record.start_ms
            alike = other.record.points == self.record.points
            if is_older and alike and other.is_complete():
                shutil.rmtree(other.path, ignore_errors=True)


def _found_at(folder: Path, points: str) -> tuple[str, str]:
    """Points and reports of the run in `folder`, whose data folder may have moved."""
    is_aside = Path(points).parent.name == folder.name
    place = folder if is_aside else folder.parent.parent
    return str(place / Path(points).name), str(place)


def run_folders(parent: Path) -> list[RunFolder]:
    """The runs that MLflow may lack something of, and the last ones; oldest first."""
    loaded = [RunFolder.load(file.parent) for file in parent.glob(f"*/{RECORD}")]
    found = [f for f in loaded if f and f.record.status != DROPPED]
    return sorted(found, key=lambda f: f.record.start_ms)


def begin(parent: Path, record: RunRecord, *, goes_on: bool) -> RunFolder:
    """Folder below `parent` of a run that starts now.

    With `goes_on` the run continues the last one of the same points, if that did not
    finish; otherwise what MLflow lacks of that one is set aside.
    """
    earlier = [f for f in run_folders(parent) if f.record.points == record.points]
    if earlier and goes_on and earlier[-1].record.status != "FINISHED":
        return _continued(earlier[-1], record)
    points = Path(record.points) if record.points else None
    if points and points.is_file() and not earlier:  # of a training outside Kedro
        os.replace(points, points.with_suffix(f".earlier{points.suffix}"))
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
    kept.tracking_uri, kept.registry_uri = now.tracking_uri, now.registry_uri
    kept.artifact_location, kept.baseline = now.artifact_location, None
    folder.save()
    return folder
