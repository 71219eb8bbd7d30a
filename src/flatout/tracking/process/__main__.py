"""The process that has MLflow: `RemoteForwarder` starts it, and talks to it by a pipe.

It ends where its starter does, whatever the store does at that moment.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flatout.engine.machine.garbage import collect_rarely
from flatout.tracking.facts import write_environment
from flatout.tracking.outbox import Outbox, RunRecord
from flatout.tracking.process.connect import Connect
from flatout.tracking.process.remote import ANSWERED
from flatout.tracking.store import one_line

NEEDED_LATER = (
    "flatout.tracking.process.text_model",
    "git",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
)
"""Imported while the run trains, not when it waits."""


class Server:
    """Answers what the run's process asks, one thing after another."""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def tell(self, what: str, value: Any) -> None:
        with self._lock:
            self._pipe.send((what, value))

    def serve(self) -> None:
        """Until the run has ended, or the pipe."""
        what = ""
        while what != "finish":
            what, number, arguments = self._pipe.recv()
            if not number:
                getattr(self, what)(*arguments)
                continue
            try:
                answer = (number, True, getattr(self, what)(*arguments))
            except Exception as error:
                own = type(error).__module__.startswith("flatout.")
                told = error if own else RuntimeError(one_line(error))
                answer = (number, False, told)
            self.tell("answer", answer)

    def begin(
        self, points: Path, record: RunRecord, connect: Connect, system_metrics: bool
    ) -> None:
        from flatout.tracking.forwarder import Forwarder

        # Kedro, which this imports, sets up logging again.
        import_module("kedro_mlflow.config.kedro_mlflow_config")
        Hand.over(self)
        self._outbox = Outbox(points, record)
        self._forwarder = Forwarder(
            self._outbox, connect, system_metrics=system_metrics, root_pid=os.getppid()
        )
        self._forwarder.when_tried = lambda: self.tell("state", self._state())
        self._forwarder.start()
        write_environment(points)
        for name in NEEDED_LATER:
            import_module(name)

    def update(self, noted: dict[str, Any]) -> None:
        for name, value in noted.items():
            setattr(self._outbox.record, name, value)

    def flush(self, limit_s: float) -> bool:
        return self._forwarder.flush(limit_s)

    def verdict(self) -> tuple[bool, str]:
        return self._forwarder.gpu_verdict()

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        return function(*arguments)

    def finish(
        self, noted: dict[str, Any], limit_s: float
    ) -> tuple[dict[str, Any], float]:
        self.update(noted)
        self._forwarder.finish(noted["status"], noted["end_ms"], limit_s=limit_s)
        return self._state(), self._forwarder.pictures_s

    def _state(self) -> dict[str, Any]:
        snapshot = self._outbox.record.snapshot()
        return {
            "failing": self._forwarder.failing,
            "deliveries": self._forwarder.deliveries,
            "record": {name: snapshot[name] for name in ANSWERED},
        }


class Hand(logging.Handler):
    """Messages to the run's process, whose terminal they belong on."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server

    @classmethod
    def over(cls, server: Server) -> None:
        own = logging.getLogger("flatout")
        own.setLevel(logging.INFO)
        own.addHandler(cls(server))
        own.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            self._server.tell("log", (record.name, record.levelno, text))
        except OSError:
            self.handleError(record)


def main(descriptor: int) -> None:
    collect_rarely()
    # MLflow asks whether this is a notebook by importing it: half a second.
    sys.modules["IPython"] = None  # type: ignore[assignment]
    server = Server(Connection(descriptor))
    with suppress(EOFError, OSError):
        server.serve()
    os._exit(0)  # a store that hangs keeps nobody here


if __name__ == "__main__":
    main(int(sys.argv[1]))
