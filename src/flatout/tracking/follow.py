"""Follow a run and send its new data to MLflow, in the separate tracking program."""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

from flatout.engine.parameters.secrets import without_password
from flatout.engine.train.recording.metrics_file import read_points
from flatout.tracking.mlflow_sender import SYSTEM, MlflowSender
from flatout.tracking.record import DROPPED, RunFolder, RunRecord, run_folders
from flatout.tracking.store import (
    STARTED_TAG,
    default_artifact_location,
    one_line,
    process_lives,
)
from flatout.tracking.system import SystemMetrics

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between checks of whether the run has ended."""
INTERVAL_S = 10.0
"""Seconds between deliveries. The interval doubles each time the store fails."""
LONGEST_PAUSE_S = 60.0
RATE = "train_samples_per_second"
EARLY_WINDOWS = 5
"""Number of windows after the warm-up that are used for the early speed check."""


class Follower:
    """Follows a run until it has ended or its process is gone. Errors of the store are
    logged and never raised."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.sender = MlflowSender(folder)
        self._failures = 0
        self._system: SystemMetrics | None = None
        file = folder.path / SYSTEM
        self._samples = len(file.read_bytes().splitlines()) if file.is_file() else 0
        self._has_looked = False

    def run(self) -> None:
        due_s = 0.0
        while not self._has_ended():
            if time.monotonic() >= due_s:
                self._sample()
                self.deliver()
                self._warn_if_slow()
                pause_s = min(INTERVAL_S * 2**self._failures, LONGEST_PAUSE_S)
                due_s = time.monotonic() + pause_s
            time.sleep(POLL_S)
        if self._record.status != DROPPED:
            self._sample()
            self.deliver(ended=True)

    @property
    def _record(self) -> RunRecord:
        return self.folder.record

    def _has_ended(self) -> bool:
        before = self._record.model
        if found := RunFolder.load(self.folder.path):
            self.folder.record = found.record
        if self._record.model and not before:
            self.deliver()  # the run does other work in the meantime
        return self._record.end_ms is not None or not process_lives(self._record.tags)

    def deliver(self, *, ended: bool = False) -> None:
        try:
            client, fault = self.sender.client(), None
            if ended:
                self.sender.end(client, *end_of(self._record))
            else:
                self.sender.send(client)
            self._failures = 0
        except Exception as error:  # tracking must never end a run
            fault = one_line(error)
            logger.debug("not delivered", exc_info=True)
            if not self._failures:
                logger.warning(
                    "MLflow at %s does not respond (%s). Training continues; "
                    "every point is kept.",
                    without_password(self.sender.uri),
                    fault,
                )
            self._failures += 1
        if self.sender.sent.fault != fault:
            self.sender.sent.fault = fault
            with suppress(OSError):
                self.sender.save()

    def _sample(self) -> None:
        """Append a sample of the system metrics to the file that the sender follows."""
        if not self._record.system_metrics:
            return
        if self._system is None:
            self._system = SystemMetrics(int(self._record.tags["flatout.pid"]))
            return
        self._samples += 1
        line = {"step": self._samples, "metrics": self._system.sample()}
        line["time_s"] = time.time()
        file = self.folder.path / SYSTEM
        with suppress(OSError), file.open("a", encoding="utf-8") as samples:
            samples.write(json.dumps(line) + "\n")

    def _warn_if_slow(self) -> None:
        """Warn once if the first windows of a training run are slow."""
        known = self._record.baseline
        if self._has_looked or not known:
            return
        started_s = float(self._record.tags[STARTED_TAG])  # a resumed run began earlier
        begin_s = max(started_s, self._record.start_ms / 1000)
        points = read_points(Path(self._record.points or ""))
        late = [p["metrics"] for p in points if p.get("time_s", 0.0) >= begin_s]
        rates = [metrics[RATE] for metrics in late if RATE in metrics]  # not in warm-up
        if len(rates) < EARLY_WINDOWS:
            return
        self._has_looked, rate_pct = True, 100 * median(rates) / known["rate"]
        if rate_pct < known["healthy_low_pct"]:
            logger.warning(
                "after %d windows: guard: %.0f samples/s in the median window, %.0f %% "
                "of the baseline's %.0f (run %s)",
                *(len(rates), median(rates), rate_pct, known["rate"], known["name"]),
            )


def end_of(record: RunRecord) -> tuple[str, int]:
    """Return the status and end time (ms) of a run that has ended or was killed."""
    if record.end_ms is not None:
        return record.status, record.end_ms
    return "KILLED", int(time.time() * 1000)


@contextmanager
def run_lock(folder: Path, *, waits: bool) -> Iterator[bool]:
    """Context manager that locks a run's folder and yields True. If another process
    holds the lock, the manager waits if `waits` is True, and yields False otherwise."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError as error:  # a file system without locks
            logger.debug("%s is not locked: %s", folder, error)
        yield True


def follow(path: Path) -> None:
    """Follow the run in the folder `path` until it ends."""
    with run_lock(path, waits=True):
        folder = RunFolder.load(path)
        if folder and not folder.is_complete():  # another program may have sent it
            Follower(folder).run()


def sync(parent: Path, uri: str | None = None) -> list[str]:
    """Send the unsent data of the runs in `parent`, and return a line about each run
    that had such data. If `uri` is given, the data is sent to that store instead of the
    original one."""
    lines = []
    for folder in run_folders(parent):
        if not folder.is_complete():
            lines.append(_sync_one(folder, uri))
        if folder.record.reporting == str(folder.path) and folder.is_complete():
            shutil.rmtree(folder.path)  # the folder contained a copy of an earlier run
    return lines


def _sync_one(folder: RunFolder, uri: str | None) -> str:
    record = folder.record
    with run_lock(folder.path, waits=False) as is_alone:
        if not is_alone or (record.end_ms is None and process_lives(record.tags)):
            return f"{record.name}: still running, it sends its points itself"
        if uri and uri != record.tracking_uri:
            record.tracking_uri = uri
            record.artifact_location = default_artifact_location(uri)
        place = without_password(record.tracking_uri)
        sender = MlflowSender(folder)
        try:
            run_id = sender.end(sender.client(), *end_of(record))
        except Exception as error:
            return f"{record.name}: not sent to {place} ({one_line(error)})"
        finally:
            if sender.sent.run_id:  # the next sync continues the run in the store
                folder.save()
    return f"{record.name}: sent to {place} as run {run_id}"
