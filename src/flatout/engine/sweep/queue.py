"""The queue of a sweep: trials of an Optuna study that several machines work on.

A combination belongs to the live trial of the lowest number that has it. A trial is
given back by failing it, and what no live trial has is queued again: that needs no
locks across machines, and a machine may die between any two of these lines.
"""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
from optuna.exceptions import UpdateFinishedTrialError
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from flatout.engine.files.owner import process_space, runs_since
from flatout.engine.parameters import SweepSettings
from flatout.engine.sweep.space import Changes, combinations, distributions, key_of
from flatout.engine.sweep.storage import Patience

logger = logging.getLogger(__name__)

MISSED_HEARTBEATS = 3
ANSWER, MACHINE = "answer", "machine"
"""Attributes of a trial. As few as can be: a database lists each in a row."""
BEAT_S = "beat_s"
"""Of a machine's attribute: its last sign of life."""


@dataclass
class Queue:
    """Safe for threads; what it asks of the storage it asks patiently."""

    study: Study
    options: SweepSettings
    stop: threading.Event
    machine: Mapping[str, Any] = field(default_factory=lambda: this_machine())  # noqa: PLW0108
    patience: Patience = field(init=False)
    _again: frozenset[int] = frozenset()
    """Failed before this command began: it tries them once more."""
    _seen: dict[int, tuple[Any, float]] = field(default_factory=dict)
    """Of others' running trials: the heartbeat, and when it was new here."""
    _looked_s: float = 0.0
    _turn: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.patience = Patience(self.options.storage, self.stop)
        self._grid = combinations(self.options) if self._is_grid else []
        self._places = {key_of(c): place for place, c in enumerate(self._grid)}
        self._space = distributions(self.options)
        failed = (t.number for t in self.trials() if t.state == TrialState.FAIL)
        self._again = frozenset(failed)

    @property
    def _is_grid(self) -> bool:
        return self.options.sampler == "grid"

    def place(self, trial: Trial | FrozenTrial) -> int:
        """From 1: of its combination in the grid, or of the trial itself."""
        place: int = self._places.get(key_of(trial.params), trial.number)
        return place + 1

    @property
    def total(self) -> int:
        return len(self._grid) if self._is_grid else self.options.n_trials

    def trials(self) -> list[FrozenTrial]:
        """All that the study has, in the order of their numbers."""
        found: list[FrozenTrial] = self._ask(
            lambda: self.study.get_trials(deepcopy=False)
        )
        return found

    def live(self) -> list[FrozenTrial]:
        """Those that wait, run, or have ended for good."""
        return [trial for trial in self.trials() if self._is_live(trial)]

    def done(self) -> bool:
        """Whether no trial waits, runs, or is to be queued."""
        live = self.live()
        return all(t.state.is_finished() for t in live) and not self._is_owed(live)

    def take(self) -> Trial | None:
        """The next trial; None where none is left that nobody has."""
        while not self.stop.is_set():
            with self._turn:
                live = self.live()
                waits = any(t.state == TrialState.WAITING for t in live)
                if not waits and not self._is_owed(live):
                    return None
                if not waits and (owed := self._owed(live)):
                    self._queue(owed[0])
                trial = self._ask(lambda: self.study.ask(self._space))
                if self._keeps(trial):
                    return trial
            # Without the turn, which the heartbeats of other devices need.
            self.stop.wait(0 if self._is_grid else 1)
        return None

    def _queue(self, changes: Changes) -> None:
        """Whole, which is one line of a journal: `enqueue_trial` needs many."""
        waiting = create_trial(
            state=TrialState.WAITING,
            params=dict(changes),
            distributions=self._space,
        )
        self._ask(lambda: self.study.add_trial(waiting))

    def _keeps(self, trial: Trial) -> bool:
        """Whether `trial` is this machine's to train, marked so. Optuna draws one where
        another machine took what was queued: it need not be of the grid."""
        self._mark(trial)
        is_known = not self._is_grid or key_of(trial.params) in self._places
        below = [t for t in self.live() if t.number < trial.number]
        twin = next((t for t in below if t.params == trial.params), None)
        if twin is None and is_known and (self._is_grid or len(below) < self.total):
            return True
        if twin is not None and twin.state.is_finished() and not self._is_grid:
            self._copy(trial, twin)  # tpe may suggest again what has been tried
        else:
            self.give_back(trial)
        return False

    def _copy(self, trial: Trial, twin: FrozenTrial) -> None:
        self.finish(trial, twin.user_attrs[ANSWER], twin.value)

    def beat(self, trial: Trial) -> bool:
        """Say that `trial` goes on; False where another machine took it for dead.
        Raises StorageError where that cannot be known."""
        try:
            self._mark(trial)
        except UpdateFinishedTrialError:
            return False
        return True

    def finish(
        self, trial: Trial, answer: Mapping[str, Any], value: float | None
    ) -> bool:
        """Tell what a trial gave; False where another machine has told it before."""
        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        if answer["status"] == "pruned":
            state, value = TrialState.PRUNED, None
        try:
            self._attribute(trial, ANSWER, dict(answer))
            self._tell(trial.number, state, value)
        except (UpdateFinishedTrialError, ValueError):
            return False
        return True

    def give_back(self, trial: Trial | FrozenTrial) -> None:
        """Let any machine have it, from its newest checkpoint."""
        with suppress(UpdateFinishedTrialError, ValueError):  # it has ended meanwhile
            self._tell(trial.number, TrialState.FAIL, None)

    @property
    def fate_of_trials(self) -> str:
        """What becomes of the trials of a command that was stopped."""
        if not self.patience.is_away:
            return "what was being trained is queued again"
        return (
            "sweep.storage does not answer, so other machines take what was being "
            "trained when its heartbeat has ended"
        )

    def look(self) -> None:
        """Give back trials of machines that are gone."""
        with self._turn:
            now_s, every_s = time.monotonic(), self.options.heartbeat_s
            if now_s - self._looked_s > 2 * every_s:
                self._seen.clear()  # who was not looked at may have beaten
            self._looked_s = now_s
            for trial in self.trials():
                if trial.state == TrialState.RUNNING and self._is_dead(trial, now_s):
                    name = trial.user_attrs.get(MACHINE, {}).get("host", "a machine")
                    logger.warning(
                        "trial %d of %s gave no sign of life: it is queued again",
                        self.place(trial),
                        name,
                    )
                    self.give_back(trial)

    def _is_dead(self, trial: FrozenTrial, now_s: float) -> bool:
        machine = dict(trial.user_attrs.get(MACHINE, {}))
        beat = machine.pop(BEAT_S, None)
        if machine == self.machine:
            return False
        if machine and machine["boot"] == self.machine["boot"]:
            return not runs_since(machine["pid"], machine["begin_s"])
        known, since_s = self._seen.setdefault(trial.number, (beat, now_s))
        if known != beat:
            self._seen[trial.number] = (beat, now_s)
            return False
        return now_s - since_s > MISSED_HEARTBEATS * self.options.heartbeat_s

    def _is_live(self, trial: FrozenTrial) -> bool:
        """A failed one does where its training said so to this command."""
        if trial.state != TrialState.FAIL:
            return True
        answer = trial.user_attrs.get(ANSWER)
        settled = answer is not None and answer["status"] not in ("ok", "pruned")
        return settled and (
            trial.number not in self._again or answer["status"] == "oom"
        )

    def _is_owed(self, live: Sequence[FrozenTrial]) -> bool:
        """Whether there is something to try that no live trial has."""
        return len(live) < self.total if not self._is_grid else bool(self._owed(live))

    def _owed(self, live: Sequence[FrozenTrial]) -> list[Changes]:
        """What to queue by name: of tpe only what was given back."""
        taken = {key_of(trial.params) for trial in live}
        wanted = self._grid or [
            trial.params
            for trial in self.trials()
            if not self._is_live(trial) and set(trial.params) == set(self._space)
        ]
        return [changes for changes in wanted if key_of(changes) not in taken]

    def _mark(self, trial: Trial) -> None:
        self._attribute(trial, MACHINE, {**self.machine, BEAT_S: time.time()})

    def _attribute(self, trial: Trial, name: str, value: Any) -> None:
        self._ask(lambda: trial.set_user_attr(name, value))

    def _tell(self, number: int, state: TrialState, value: float | None) -> None:
        self._ask(lambda: self.study.tell(number, value, state=state))

    def _ask(self, call: Any) -> Any:
        return self.patience.ask(call)


def this_machine() -> dict[str, Any]:
    """A process, so that others on the same machine know whether it is alive."""
    process = psutil.Process()
    return {
        "host": platform.node(),
        "boot": process_space(),
        "pid": process.pid,
        "begin_s": process.create_time(),
    }
