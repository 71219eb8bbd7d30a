"""Run the queued trials of a study until the queue is empty, with one thread per set
of devices and one process per trial."""

from __future__ import annotations

import logging
import math
import platform
import shutil
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Queue

import optuna
from filelock import FileLock
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial

from flatout.engine.benchmark.trials.processes import KEPT, Answer, ask, stored_answer
from flatout.engine.benchmark.trials.trial import TRAINING
from flatout.engine.benchmark.trials.trial_spec import TrialSpec, with_changes
from flatout.engine.launch.job_files import JobFiles
from flatout.engine.machine.signals import Interrupted, StopSignals
from flatout.engine.parameters import Settings, SettingsError
from flatout.engine.parameters.faults import near_or_all
from flatout.engine.sweep import queued
from flatout.engine.sweep.devices import Devices, sets_of
from flatout.engine.sweep.pruning import Pruning
from flatout.engine.sweep.space import (
    FOLD,
    Changes,
    check_sweep,
    combinations,
    objective,
    repeated,
    suggested,
)
from flatout.engine.sweep.storage import FAULTS, StorageError, opened
from flatout.engine.sweep.study import open_study, trained_by

logger = logging.getLogger(__name__)

FORMAT = 1
"""Increase this whenever the meaning of stored results changes. Older results are then
ignored."""
POLL_S = 2.0
"""Seconds between checks whether other machines are still running trials."""


class NoValueError(Exception):
    """Raised if a trial ends without the metric to compare. Other trials continue."""


def run_sweep(
    settings: Settings, files: JobFiles, folds: Sequence[JobFiles] = ()
) -> list[queued.Row]:
    """Run a sweep and return one row for each trial on any machine. With `folds`, each
    setting is trained once per fold, and its rows contain the metrics of the fold's
    test split. Raises SettingsError if the settings are invalid, StorageError if the
    storage fails, and Interrupted on SIGTERM or Ctrl-C."""
    check_sweep(settings, len(folds))
    settings = repeated(settings, len(folds))
    devices = sets_of(settings.sweep.devices_per_trial)
    folder = Path(settings.sweep.folder)
    folder.mkdir(parents=True, exist_ok=True)
    with opened(settings.sweep, queued.requeue) as storage:
        study = open_study(files.open(settings, folder), storage)
        with StopSignals("ending the trials") as signals:
            sweep = Sweep(settings, files, folder, study, devices, signals, folds)
            return sweep.run()


@dataclass
class Sweep:
    settings: Settings
    files: JobFiles
    folder: Path
    """Folder with a subfolder for each trial (spec.json, log.txt, answer.json)."""
    study: Study
    devices: Sequence[Devices]
    signals: StopSignals
    folds: Sequence[JobFiles] = ()
    _free: Queue[Devices] = field(default_factory=Queue)

    def __post_init__(self) -> None:
        self.options = self.settings.sweep
        name, _ = objective(self.settings)
        self.metric = name.replace("validation_", "test_", 1) if self.folds else name
        self.figures = list(dict.fromkeys([self.metric, *queued.FIGURES]))
        self.total = (
            len(combinations(self.options))
            if self.options.sampler == "grid"
            else self.options.n_trials
        )
        for one in self.devices:
            self._free.put(one)

    def run(self) -> list[queued.Row]:
        """Run trials until all trials of all machines are done, and return their rows.
        If another machine stops sending heartbeats, its trials are continued here."""
        is_logged = False
        while not self.signals.received:
            if queued.has_remaining_trials(self.study, self.options):
                self._optimize()
            elif others := queued.running(self.study):
                if not is_logged:
                    is_logged = True
                    logger.info("other machines train %d trials, waiting", len(others))
                time.sleep(POLL_S)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ExperimentalWarning)
                    optuna.storages.fail_stale_trials(self.study)
            else:
                break
        if self.signals.received:
            logger.warning(
                "Interrupted: the same command, here or on another machine, resumes "
                "from the newest checkpoint of each trial"
            )
            raise Interrupted(self.signals.received)
        kept = queued.best_trial_by_place(queued.ended(self.study))
        return [queued.row(kept[place], place) for place in sorted(kept)]

    def _optimize(self) -> None:
        try:
            self.study.optimize(
                self._objective,
                n_jobs=len(self.devices),
                catch=(NoValueError,),
                callbacks=[self._stop_at_the_end],
            )
        except (ValueError, AssertionError) as error:  # Optuna failed to end a trial
            if isinstance(error.__context__, UpdateFinishedTrialError):
                raise StorageError(
                    "a trial was queued again, because this machine missed three "
                    f"heartbeats of {self.options.heartbeat_s:g} s. Its checkpoints "
                    "are kept: the same command resumes"
                ) from None
            if isinstance(error.__context__, FAULTS):
                raise error.__context__ from None
            raise

    def _stop_at_the_end(self, study: Study, _: FrozenTrial) -> None:
        remain = queued.has_remaining_trials(study, self.options)
        if self.signals.received or not remain:
            study.stop()

    def _objective(self, trial: Trial) -> float:
        if not queued.is_wanted(self.study, self.options, trial):
            raise NoValueError("no trial is left")
        devices = self._free.get()
        try:
            return self._value(trial, devices)
        finally:
            self._free.put(devices)

    def _value(self, trial: Trial, devices: Devices) -> float:
        changes = suggested(trial, self.options)
        ranks = self.options.devices_per_trial
        spec, one_rank = self._spec(changes, ranks), self._spec(changes, 1)
        by = trained_by(spec.settings.model)
        # Machines share a trial's folder even if their sets of devices differ in size.
        data = self._files_of(changes).data_key
        key = one_rank.key({"data": data, "format": FORMAT, "by": by})
        folder = self.folder / key
        folder.mkdir(exist_ok=True)
        with FileLock(folder / ".lock"):  # tpe may draw equal trials at the same time
            answer = self._answer(spec, folder, devices, trial)
        if answer.status == "stopped":
            queued.requeue(self.study, trial)
            raise NoValueError("stopped")
        if answer.status == "ok" and self.metric not in answer.figures:
            # The result can be reused with another metric.
            queued.requeue(self.study, trial)
            near = near_or_all(self.metric, answer.figures)
            raise SettingsError(f"no trial has the metric {self.metric}: {near}")
        if answer.status in (*KEPT, "pruned"):
            shutil.rmtree(folder / TRAINING, ignore_errors=True)
        return self._record(trial, answer, folder)

    def _spec(self, changes: Changes, ranks: int) -> TrialSpec:
        fixed = {"train.distributed.num_processes": ranks, "train.resume": "auto"}
        own = {path: value for path, value in changes.items() if path != FOLD}
        settings = with_changes(self.settings, {**own, **fixed})
        return TrialSpec("train", "sweep", settings)

    def _files_of(self, changes: Changes) -> JobFiles:
        return self.folds[int(changes[FOLD]) - 1] if FOLD in changes else self.files

    def _answer(
        self, spec: TrialSpec, folder: Path, devices: Devices, trial: Trial
    ) -> Answer:
        """Return the stored result of a trial, or run it."""
        kept = stored_answer(folder)
        if kept and kept.status == "ok":  # retry others: memory may now be sufficient
            return kept
        pruning = Pruning(trial, folder, self.metric)
        # Report nothing without a pruner, because every command reads all reports.
        prunes = self.options.pruner != "none"
        answer = ask(
            spec,
            self._files_of(trial.params),
            folder,
            self.options.trial_timeout_s or math.inf,
            self.settings.benchmark.memory_headroom,
            devices,
            lambda: bool(self.signals.received) or (prunes and pruning.look()),
        )
        if not pruning.is_worse or answer.status != "stopped":
            return answer
        note = f"after {pruning.evaluations} evaluations"
        figures = {self.metric: pruning.value}
        return replace(answer, status="pruned", note=note, figures=figures)

    def _record(self, trial: Trial, answer: Answer, folder: Path) -> float:
        value = answer.figures.get(self.metric)
        if answer.status == "ok" and (value is None or not math.isfinite(value)):
            answer = replace(answer, status="error", note=f"{self.metric} is {value}")
        result = {
            **{n: queued.number(answer.figures.get(n)) for n in self.figures},
            "status": answer.status,
            "note": answer.note,
            **{n: answer.figures.get(n) for n in queued.FACTS},
            "elapsed_s": answer.elapsed_s,
            "key": folder.name,
            "log": str((folder / "log.txt").absolute()),
            "machine": platform.node(),
        }
        trial.set_user_attr(queued.ANSWER, result)
        logger.info(
            "trial %d of %d: %s, %s: %s",
            queued.place_of(trial),
            self.total,
            queued.shown(trial.params),
            answer.status,
            queued.shown({n: result[n] for n in self.figures})
            or f"{answer.note} ({result['log']})",
        )
        if answer.status == "pruned":
            raise optuna.TrialPruned
        if answer.status != "ok":
            raise NoValueError(answer.note)
        return float(result[self.metric])
