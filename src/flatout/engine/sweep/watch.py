"""Beside a trial's process: its heartbeat, its evaluations, and whether it goes on."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import Trial

from flatout.engine.benchmark.trials.processes import Answer
from flatout.engine.sweep.queue import Queue
from flatout.engine.sweep.storage import StorageError
from flatout.engine.train.recording.metrics_file import parse_point

logger = logging.getLogger(__name__)

LOOK_S = 0.5


@dataclass
class Watch:
    """A thread, for as long as the `with` block lasts."""

    queue: Queue
    trial: Trial
    folder: Path
    """Of the trial."""
    metric: str
    over: threading.Event = field(default_factory=threading.Event)
    """Set where the trial's process is to end."""
    _verdict: str = ""
    """Why it was ended: pruned, lost."""
    _evaluations: int = 0
    _value: float | None = None
    _outage_told: bool = False
    _end: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()

    def judged(self, answer: Answer) -> Answer:
        """`answer`, or why the trial was stopped."""
        if answer.status != "stopped" or not self._verdict:
            return answer
        note = f"after {self._evaluations} evaluations"
        figures = {self.metric: self._value}
        return replace(answer, status=self._verdict, note=note, figures=figures)

    def _watch(self) -> None:
        next_s = time.monotonic() + self.queue.options.heartbeat_s
        while not self._end.is_set():
            if self.queue.stop.is_set():
                self.over.set()
                return
            try:
                self._report()
                if time.monotonic() >= next_s:
                    next_s = time.monotonic() + self.queue.options.heartbeat_s
                    self._beat()
            except UpdateFinishedTrialError:
                self._stop("lost")
            except StorageError as error:
                self._note_outage(error)
            self._end.wait(LOOK_S)

    def _note_outage(self, error: StorageError) -> None:
        """The storage may be back before the training ends: then others hear of it,
        and its answer is told. Else that is kept in its folder."""
        if not self._outage_told and not self.queue.stop.is_set():
            logger.warning("%s. The training goes on to its end", error)
        self._outage_told = True

    def _beat(self) -> None:
        if not self.queue.beat(self.trial):
            logger.warning(
                "trial %d was taken for dead and is another machine's now: its "
                "training here ends",
                self.queue.place(self.trial),
            )
            self._stop("lost")
        self.queue.look()

    def _report(self) -> None:
        """New evaluations, in order; the pruner is asked at each. Without one they stay
        out of the storage, which everybody reads from its first line."""
        prunes = self.queue.options.pruner != "none"
        for number, value in enumerate(self._new_values(), self._evaluations + 1):

            def report(value: float = value, number: int = number) -> bool:
                self.trial.report(value, number)
                return bool(self.trial.should_prune())

            is_behind = prunes and self.queue.patience.ask(report)
            self._evaluations, self._value = number, value
            if is_behind:
                self._stop("pruned")
                return

    def _new_values(self) -> list[float]:
        file = self.folder / "metrics.jsonl"
        try:
            lines = file.read_bytes().split(b"\n")[:-1]
        except OSError:  # not there yet, or its disk is away: looked at again
            return []
        points = (parse_point(line).get("metrics", {}) for line in lines)
        values = [point[self.metric] for point in points if self.metric in point]
        return values[self._evaluations :]

    def _stop(self, verdict: str) -> None:
        self._verdict = self._verdict or verdict
        self.over.set()
