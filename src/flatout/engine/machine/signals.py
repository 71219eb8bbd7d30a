"""Handle SIGTERM and Ctrl-C so that a run can finish its step, save its state and exit.
Also make helper processes exit when the run that started them ends."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from flatout.engine.machine.environment import starter

logger = logging.getLogger(__name__)

STOPPING = (signal.SIGTERM, signal.SIGINT)


class Interrupted(SystemExit):
    """Raised after SIGTERM (exit code 143) or SIGINT (130) has stopped a run. This is
    not an error, because the same command resumes the run."""

    def __init__(self, signum: int, message: str = "") -> None:
        super().__init__(128 + signum)
        self.signum = signum
        self.message = message

    def __str__(self) -> str:
        return self.message


class StopSignals:
    """Context manager that catches SIGTERM and SIGINT, and stores the number of the
    first signal in `received`. A second Ctrl-C ends the process immediately. Outside
    the main thread, no signals are caught."""

    def __init__(
        self, then: str = "finishing this step, then saving and exiting"
    ) -> None:
        """`then` describes the reaction to a signal and is used in the log message."""
        self._then = then
        self.received: int | None = None
        self._before: dict[int, Any] = {}
        self._owner = 0

    def __enter__(self) -> StopSignals:
        self._owner = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for signum in STOPPING:
                self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before.clear()

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # forked loader workers ignore the signal
            return
        if signum == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if signal.SIGCHLD not in self._before:
            # A signal to the process group also ends loader workers. Ignore their exit.
            before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._before[signal.SIGCHLD] = before
        if self.received is None:
            self.received = signum
            name = signal.Signals(signum).name
            logger.warning("%s: %s", name, self._then)


def die_with_parent() -> None:
    """Make this process end as soon as its parent has ended, for whatever reason."""
    parent = starter()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
