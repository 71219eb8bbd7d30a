"""Sends a run's points while it goes on, and what is left of it when it has ended."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from mlflow import MlflowClient

from flatout.tracking.outbox import UNSENT, Outbox, send, send_end
from flatout.tracking.store import close_stale_runs, one_line, process_lives

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
LONGEST_PAUSE_S = 60.0
END_LIMIT_S = 10.0
END_LIMIT_OF_A_FAILING_STORE_S = 3.0


class Forwarder:
    """A thread that sends what is new every second, and never raises.

    After a failure it waits 2 s, then 4 s, ... up to a minute, before it tries again.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._ended = threading.Event()
        self._failures = 0
        self._thread = threading.Thread(
            target=self._run, name="flatout-tracking", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def finish(self, status: str, end_ms: int, *, limit_s: float = END_LIMIT_S) -> bool:
        """Send the rest within `limit_s`; True where the store has all of the run."""
        record = self._outbox.record
        record.status, record.end_ms = status, end_ms
        self._outbox.save()
        failing = self._failures > 0
        self._ended.set()
        self._thread.join(END_LIMIT_OF_A_FAILING_STORE_S if failing else limit_s)
        if not record.complete:
            logger.warning(
                "MLflow at %s does not have all of this run. The rest is in %s; "
                "`kedro flatout sync` sends it.",
                record.tracking_uri,
                self._outbox.points.parent,
            )
        return record.complete

    def _run(self) -> None:
        client: MlflowClient | None = None
        pause = INTERVAL_S
        while True:
            ended = self._ended.wait(pause)
            try:
                client = client or self._connected()
                (send_end if ended else send)(self._outbox, client)
                self._failures = 0
            except Exception as error:  # tracking never ends a run
                self._failed(error)
            if ended:
                return
            pause = min(INTERVAL_S * 2**self._failures, LONGEST_PAUSE_S)

    def _connected(self) -> MlflowClient:
        record = self._outbox.record
        client = MlflowClient(record.tracking_uri)
        close_stale_runs(client, record.experiment, keep=record.run_id)
        return client

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            logger.warning(
                "MLflow at %s takes nothing at the moment (%s). Training goes on; "
                "every point is in %s.",
                self._outbox.record.tracking_uri,
                one_line(error),
                self._outbox.points,
            )


def sync(points: Path) -> list[str]:
    """Send what MLflow lacks of the run at `points` and of those set aside before it.

    Returns a line a run; one that still runs is left to its own process.
    """
    waiting = sorted((points.parent / UNSENT).glob("*/*.jsonl"))
    lines = []
    for path in [*waiting, points]:
        outbox = Outbox.load(path)
        if outbox is None or outbox.record.complete:
            continue
        lines.append(_sync_one(outbox))
    return lines


def _sync_one(outbox: Outbox) -> str:
    record = outbox.record
    if record.end_ms is None and process_lives(record.tags):
        return f"{record.name}: still running, it sends its points itself"
    if record.end_ms is None:
        record.status = "KILLED"
    try:
        send_end(outbox, MlflowClient(record.tracking_uri))
    except Exception as error:
        return f"{record.name}: not sent to {record.tracking_uri} ({one_line(error)})"
    return f"{record.name}: sent to {record.tracking_uri} as run {record.run_id}"
