"""Sends a run's points while it goes on, and what is left of it when it has ended."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric

from flatout.engine.parameters.secrets import without_password
from flatout.tracking.outbox import Outbox, set_aside_beside
from flatout.tracking.sending import Sender
from flatout.tracking.store import (
    END_LIMIT_S,
    activate_run,
    artifacts_beside,
    cause,
    close_stale_runs,
    forget_active_run,
    one_line,
    process_lives,
)
from flatout.tracking.system import SystemMetrics

logger = logging.getLogger(__name__)

# A lot costs the Kedro process about 20 ms of Python, which training may wait for:
# 0.3 % of a core in all (python -m tests.tools.tracking_cost).
INTERVAL_S = 10.0
LONGEST_PAUSE_S = 60.0
END_LIMIT_OF_A_FAILING_STORE_S = 3.0


class Forwarder:
    """A thread that sends what is new every 10 s, and never raises.

    After a failure it waits 20 s, then 40 s, then a minute, before it tries again.
    """

    is_apart = False
    """MLflow is in this process, and what it does takes this one's time."""

    def __init__(
        self,
        outbox: Outbox,
        connect: Callable[[], MlflowClient] | None = None,
        *,
        system_metrics: bool = False,
        root_pid: int | None = None,
    ) -> None:
        """`root_pid`: of the process that started all that trains; this one's."""
        self._outbox = outbox
        self._sender = Sender(outbox)
        self._wants_system = system_metrics
        self._system: SystemMetrics | None = None
        self._root_pid = root_pid
        self._connect = connect or partial(MlflowClient, outbox.record.tracking_uri)
        self.watch: Callable[[], bool] | None = None
        """Asked after each delivery, until it says that it has seen enough."""
        self.when_tried: Callable[[], None] | None = None
        """Called whenever the store was asked, whatever came of it."""
        self._ended = False
        self._wake = threading.Event()
        self._tried = threading.Event()
        self.deliveries = self._failures = self._read_bytes = 0
        self._thread = threading.Thread(
            target=self._run, name="flatout-tracking", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def wait_until_tried(self, limit_s: float) -> None:
        """Return when the store was opened, or could not be; after `limit_s` anyhow."""
        self._tried.wait(limit_s)

    def update(self) -> None:
        """The record is this process's own: there is nothing to hand on."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function that asks the store gives; MLflow is in this process."""
        return function(*arguments)

    def flush(self, limit_s: float = END_LIMIT_S) -> bool:
        """Send what there is now; True where the store took it within `limit_s`."""
        if self._failures:
            return False
        self._tried.clear()
        self._wake.set()
        self._tried.wait(limit_s)
        return self._tried.is_set() and not self._failures

    @property
    def failing(self) -> bool:
        """The store took nothing the last time."""
        return self._failures > 0

    def gpu_verdict(self) -> tuple[bool, str]:
        """Whether all was well with the GPUs so far, and one line; empty where nothing
        is known of any. What it says is news no more."""
        if self._system is None:
            return True, ""
        self._system.gpu_news()
        return not self._system.gpu_findings, self._system.gpu_summary

    @property
    def pictures_s(self) -> float:
        """What drawing took, of the seconds that `finish` waited."""
        return 0.0 if self._thread.is_alive() else self._sender.pictures_s

    def activate_run(self) -> None:
        """Make the run MLflow's active one, where the store has it and answers."""
        run_id = self._outbox.record.run_id
        if run_id and self.deliveries and not self._failures:
            try:
                activate_run(run_id)
            except Exception as error:  # tracking never ends a run
                self._failed(error)

    def finish(self, status: str, end_ms: int, *, limit_s: float = END_LIMIT_S) -> bool:
        """Send the rest within `limit_s`; True where the store has all of the run."""
        record = self._outbox.record
        record.status, record.end_ms = status, end_ms
        self._outbox.save()
        failing = self._failures > 0
        self._ended = True
        self._wake.set()
        self._thread.join(END_LIMIT_OF_A_FAILING_STORE_S if failing else limit_s)
        forget_active_run()
        if not record.complete:
            self._outbox.warn_of_rest()
        return record.complete

    def _run(self) -> None:
        client: MlflowClient | None = None
        pause = 0.0
        while True:
            asked = self._wake.wait(pause)
            self._wake.clear()
            ended = self._ended
            try:
                client = client or self._connected()
                self._send_system(client, self._sender.send(client), asked=asked)
                if ended:
                    self._sender.end(client)
                self._failures = 0
                self.deliveries += 1
                if self.watch is not None and not ended and self.watch():
                    self.watch = None
            except Exception as error:  # tracking never ends a run
                self._failed(error)
            self._tried.set()
            if self.when_tried is not None:
                self.when_tried()
            if ended:
                return
            pause = min(INTERVAL_S * 2**self._failures, LONGEST_PAUSE_S)

    def _send_system(self, client: MlflowClient, run_id: str, *, asked: bool) -> None:
        """What a store that is gone misses of it is not sent later. `asked`: the run
        is near its end, where its verdict says what is wrong; behind that, the last
        sample may still bring news."""
        if not self._wants_system:
            return
        if self._system is None:
            self._system = SystemMetrics(self._root_pid)
            return
        read, self._read_bytes = self._read_bytes, self._sender.read_bytes
        sampled = self._system.sample(training=self._read_bytes > read)
        for text in () if asked and not self._ended else self._system.gpu_news():
            logger.warning("%s", text)  # while it can still help
        now_ms = int(time.time() * 1000)
        metrics = [Metric(k, v, now_ms, self.deliveries) for k, v in sampled.items()]
        client.log_batch(run_id, metrics=metrics)

    def _connected(self) -> MlflowClient:
        record = self._outbox.record
        client = self._connect()
        close_stale_runs(client, record.experiment, keep=record.run_id)
        return client

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            logger.warning(
                "MLflow at %s takes nothing at the moment (%s). Training goes on; "
                "every point is in %s.",
                without_password(self._outbox.record.tracking_uri),
                cause(error),
                self._outbox.points,
            )


def sync(points: Path, tracking_uri: str | None = None) -> list[str]:
    """Send what MLflow lacks of the run at `points` and of those set aside before it.

    `tracking_uri`: another store than the one that each was meant for; the run at
    `points` is sent there too where its own has it. Returns a line a run; one that
    still runs is left to its own process.
    """
    lines = []
    for path in [*set_aside_beside(points), points]:
        outbox = Outbox.load(path)
        if outbox is not None and outbox.record.is_lacked_by(tracking_uri):
            lines.append(_sync_one(outbox, tracking_uri))
        if path != points and outbox is not None and outbox.record.complete:
            shutil.rmtree(path.parent)
    return lines


def _sync_one(outbox: Outbox, tracking_uri: str | None) -> str:
    record, before = outbox.record, deepcopy(outbox.record)
    if record.end_ms is None and process_lives(record.tags):
        return f"{record.name}: still running, it sends its points itself"
    if record.end_ms is None:
        record.status = "KILLED"
    if tracking_uri and tracking_uri != record.tracking_uri:
        outbox.readdress(tracking_uri, artifacts_beside(tracking_uri))
    record.complete = False
    place = without_password(record.tracking_uri)
    try:
        Sender(outbox).end(MlflowClient(record.tracking_uri))
    except Exception as error:
        if before.complete:  # in its own store: no later sync has to send it
            Outbox(outbox.points, before).save()
        return f"{record.name}: not sent to {place} ({one_line(error)})"
    return f"{record.name}: sent to {place} as run {record.run_id}"
