"""The forwarder of a run whose process has no MLflow: it starts one that has."""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

from flatout.tracking.outbox import Outbox
from flatout.tracking.process.connect import Connect
from flatout.tracking.store import END_LIMIT_S, activate_run, use

logger = logging.getLogger(__name__)

NOTED = (
    *("params", "tags", "metrics", "figures", "datasets", "trials"),
    *("status", "end_ms"),
)
"""Fields of the record that the run notes; all others are the store's answers."""
ANSWERED = ("run_id", "settled", "sent_steps", "complete", "delivered")
GRACE_S = 5.0
CALL_LIMIT_S = 600.0
"""Of a model: some are large, and some stores far."""


class Gone(Exception):
    """The process ended before it answered."""


class RemoteForwarder:
    """As `Forwarder`, which its process has: points, record and models go through a
    pipe. The process ends with this one, which never waits for its imports."""

    is_apart = True

    def __init__(
        self, outbox: Outbox, connect: Connect, *, system_metrics: bool = False
    ) -> None:
        self._outbox = outbox
        self._begin = (outbox.points, outbox.record, connect, system_metrics)
        self.watch: Callable[[], bool] | None = None
        """Asked after each delivery, until it says that it has seen enough."""
        self._watching = threading.Lock()
        self._tried = threading.Event()
        self._failing, self._deliveries = False, 0
        self._sending = threading.Lock()
        self._answers: dict[int, Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._verdict, self.pictures_s = (True, ""), 0.0

    def start(self) -> None:
        ours, theirs = Pipe()
        self._pipe: Connection[Any, Any] = ours
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flatout.tracking.process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is this process's to handle
        )
        theirs.close()
        self._send("begin", *self._begin)
        threading.Thread(
            target=self._listen, name="flatout-tracking", daemon=True
        ).start()

    def wait_until_tried(self, limit_s: float) -> None:
        """Return when the store was opened, or could not be; after `limit_s` anyhow."""
        self._tried.wait(limit_s)

    def update(self) -> None:
        """Hand on what the run has noted."""
        self._send("update", self._noted())

    def flush(self, limit_s: float = END_LIMIT_S) -> bool:
        """Send what there is now; True where the store took it within `limit_s`."""
        if self._failing:
            return False
        self.update()
        try:
            return bool(self._ask("flush", limit_s, limit_s=limit_s + GRACE_S))
        except (Gone, FutureTimeout):
            return False

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of `flatout.tracking` gives where MLflow is. Raises what it
        raises, and Gone."""
        self.update()
        return self._ask("call", function, arguments, limit_s=CALL_LIMIT_S)

    @property
    def failing(self) -> bool:
        """The store took nothing the last time."""
        return self._failing

    def gpu_verdict(self) -> tuple[bool, str]:
        """See `Forwarder.gpu_verdict`."""
        with suppress(Gone, FutureTimeout):
            self._verdict = self._ask("verdict", limit_s=GRACE_S)
        return self._verdict

    def activate_run(self) -> None:
        """For a node that may use MLflow itself: in this process too."""
        self.wait_until_tried(END_LIMIT_S)
        run_id = self._outbox.record.run_id
        if run_id and self._deliveries and not self._failing:
            try:
                use(self._outbox.record.tracking_uri)
                activate_run(run_id)
            except Exception as error:  # tracking never ends a run
                logger.debug("the run is not MLflow's active one: %s", error)

    def finish(self, status: str, end_ms: int, *, limit_s: float = END_LIMIT_S) -> bool:
        """Send the rest within `limit_s`; True where the store has all of the run."""
        record = self._outbox.record
        record.status, record.end_ms = status, end_ms
        if "mlflow" in sys.modules:
            from flatout.tracking.store import forget_active_run

            forget_active_run()
        limits = {"limit_s": limit_s + GRACE_S}
        try:
            state, self.pictures_s = self._ask(
                "finish", self._noted(), limit_s, **limits
            )
            self._take(state)
        except (Gone, FutureTimeout):
            self._outbox.save()
            self._outbox.warn_of_rest()
        self._end()
        return record.complete

    def _end(self) -> None:
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _noted(self) -> dict[str, Any]:
        """Plain values alone: PyTorch's version is a class of its own, for which the
        process would import PyTorch."""
        snapshot = self._outbox.record.snapshot()
        plain = json.dumps({name: snapshot[name] for name in NOTED})
        return dict(json.loads(plain))

    def _ask(self, what: str, *arguments: Any, limit_s: float) -> Any:
        answer: Future[Any] = Future()
        number = next(self._numbers)  # an answer that comes too late is nobody's
        self._answers[number] = answer
        if not self._send(what, *arguments, number=number):
            self._answers.pop(number, None)
            raise Gone(f"the tracking process has ended (it was asked to {what})")
        try:
            return answer.result(limit_s)
        finally:
            self._answers.pop(number, None)

    def _send(self, what: str, *arguments: Any, number: int = 0) -> bool:
        try:
            with self._sending:
                self._pipe.send((what, number, arguments))
        except (OSError, ValueError):
            self._failing = True
            return False
        return True

    def _listen(self) -> None:
        """Answers, states and messages, until the process ends."""
        while True:
            try:
                what, value = self._pipe.recv()
            except (EOFError, OSError):
                break
            if what == "answer":
                self._answered(*value)
            elif what == "log":
                name, level, text = value
                logging.getLogger(name).log(level, "%s", text)
            else:
                self._delivered(value)
        self._failing = True
        self._tried.set()
        for answer in list(self._answers.values()):
            if not answer.done():
                answer.set_exception(Gone("the tracking process has ended"))

    def _answered(self, number: int, is_well: bool, value: Any) -> None:
        answer = self._answers.get(number)
        if answer is not None and is_well:
            answer.set_result(value)
        elif answer is not None:
            answer.set_exception(value)

    def _delivered(self, state: dict[str, Any]) -> None:
        self._take(state)
        self._tried.set()
        if (
            self.watch is not None
            and not self._failing
            and self._watching.acquire(blocking=False)
        ):
            threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        """In a thread of its own: it may ask, and the listener brings the answer."""
        try:
            if self.watch is not None and self.watch():
                self.watch = None
        finally:
            self._watching.release()

    def _take(self, state: dict[str, Any]) -> None:
        self._failing, self._deliveries = state["failing"], state["deliveries"]
        for name in ANSWERED:
            setattr(self._outbox.record, name, state["record"][name])
