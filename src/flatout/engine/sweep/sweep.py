"""Trains what the queue has, one trial on a set of devices, until nothing is left."""

from __future__ import annotations

import json
import logging
import math
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, Trial

from flatout.engine.benchmark.trials.processes import KEPT, Answer, ask, kept_answer
from flatout.engine.benchmark.trials.standby import Standby
from flatout.engine.benchmark.trials.trial import TRAINING
from flatout.engine.benchmark.trials.trial_spec import TrialSpec, with_changes
from flatout.engine.launch.job_files import JobFiles
from flatout.engine.machine.signals import Interrupted
from flatout.engine.parameters import Settings
from flatout.engine.sweep.devices import Devices, sets_of
from flatout.engine.sweep.queue import ANSWER, MACHINE, Queue
from flatout.engine.sweep.space import Changes, check_sweep, objective
from flatout.engine.sweep.storage import StorageError
from flatout.engine.sweep.study import open_study, trained_by
from flatout.engine.sweep.watch import Watch

logger = logging.getLogger(__name__)

SPEC = "spec.json"
FORMAT = 1
"""Raised when a trial's answer changes its meaning: older answers are not taken."""
FIGURES = ("validation_loss", "validation_accuracy", "samples_per_s")
FACTS = ("steps", "train_wall_s", "device")
POLL_S = 2.0
"""Between two looks at what other machines still train."""

Row = dict[str, Any]
"""A line of sweep_trials.csv."""


def run_sweep(settings: Settings, files: JobFiles) -> list[Row]:
    """A line a trial, of all machines. Raises SettingsError, StorageError."""
    check_sweep(settings)
    devices = sets_of(settings.sweep.devices_per_trial)
    folder = Path(settings.sweep.folder)
    folder.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()
    study = open_study(files.open(settings, folder), stop)
    queue = Queue(study, settings.sweep, stop)
    sweep = Sweep(settings, files, folder, queue)
    try:
        with _terminated_as_interrupted():
            return sweep.run(devices)
    except KeyboardInterrupt as error:
        logger.warning(
            "Interrupted: %s; the same command, here or on another machine, goes on "
            "from its newest checkpoint",
            queue.fate_of_trials,
        )
        raise Interrupted(signal.SIGINT) from error
    finally:
        sweep.standby.close()


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """A scheduler's SIGTERM gives trials back as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass
class Sweep:
    settings: Settings
    files: JobFiles
    folder: Path
    """A sub-folder a trial: spec.json, log.txt, answer.json."""
    queue: Queue
    standby: Standby = field(default_factory=Standby)
    closing: threading.Event = field(default_factory=threading.Event)
    """Set where no device is to take another trial."""

    @property
    def metric(self) -> str:
        """What decides."""
        return objective(self.settings)[0]

    @property
    def names(self) -> list[str]:
        """Figures of a line."""
        return list(dict.fromkeys([self.metric, *FIGURES]))

    def run(self, devices: Sequence[Devices]) -> list[Row]:
        """Each set of devices takes the next trial as soon as it is free."""
        with ThreadPoolExecutor(len(devices)) as pool:
            works = [pool.submit(self._work, one) for one in devices]
            try:
                self._wait(works)
            except BaseException:  # Ctrl-C: the trials of all devices go back
                self.queue.stop.set()
                raise
        return self._rows()

    def _wait(self, works: Sequence[Future[None]]) -> None:
        """Until all have ended, or one failed. Where the storage is gone the others'
        trainings end first, and are kept."""
        try:
            for work in wait(works, return_when=FIRST_EXCEPTION).done:
                work.result()
        except StorageError:
            self.closing.set()
            wait(works)
            raise

    def _work(self, devices: Devices) -> None:
        told = False
        while not self.queue.stop.is_set() and not self.closing.is_set():
            with devices.held() as ours:
                trial = self.queue.take() if ours else None
                if trial is not None and self.closing.is_set():
                    self.queue.give_back(trial)
                elif trial is not None:
                    self._train(trial, devices)
                    continue
            if self.queue.done():
                return
            if not ours and not told:
                told = True
                names = ", ".join(devices.names)
                logger.info("GPU %s: another sweep trains on it, waiting", names)
            # A machine that still trains may die, another sweep here may end.
            self.queue.stop.wait(min(POLL_S, self.settings.sweep.heartbeat_s))
            self.queue.look()

    def _train(self, trial: Trial, devices: Devices) -> None:
        ranks = self.settings.sweep.devices_per_trial
        spec, one_rank = self._spec(trial.params, ranks), self._spec(trial.params, 1)
        by = trained_by(spec.settings.model)
        # Machines with other sets of devices share a trial's folder.
        key = one_rank.key({"data": self.files.data_key, "format": FORMAT, "by": by})
        folder = self.folder / key
        folder.mkdir(exist_ok=True)
        with Watch(self.queue, trial, folder, self.metric) as watch:
            answer = watch.judged(self._answer(spec, folder, devices, watch.over))
        if answer.status in ("stopped", "lost"):
            self.queue.give_back(trial)
            return
        if answer.status in (*KEPT, "pruned"):
            shutil.rmtree(folder / TRAINING, ignore_errors=True)
        self._tell(trial, answer, folder)

    def _spec(self, changes: Changes, ranks: int) -> TrialSpec:
        fixed = {"train.distributed.num_processes": ranks, "train.resume": "auto"}
        settings = with_changes(self.settings, {**changes, **fixed})
        return TrialSpec("train", "sweep", settings)

    def _answer(
        self, spec: TrialSpec, folder: Path, devices: Devices, over: threading.Event
    ) -> Answer:
        """Kept from before, or of a training now."""
        kept = kept_answer(folder)
        if kept and (kept.status == "ok" or _ranks_of(folder) == _ranks(spec)):
            return kept
        return ask(
            spec,
            self.files,
            folder,
            self.settings.sweep.trial_timeout_s or math.inf,
            self.settings.benchmark.memory_headroom,
            devices.variables,
            over,
            self.standby,
        )

    def _tell(self, trial: Trial, answer: Answer, folder: Path) -> None:
        value = answer.figures.get(self.metric)
        if answer.status == "ok" and (value is None or not math.isfinite(value)):
            answer = replace(answer, status="error", note=f"{self.metric} is {value}")
        told = {
            **{n: _number(answer.figures.get(n)) for n in self.names},
            "status": answer.status,
            "note": answer.note,
            **{n: answer.figures.get(n) for n in FACTS},
            "elapsed_s": answer.elapsed_s,
            "key": folder.name,
            "log": str((folder / "log.txt").absolute()),
        }
        rated = value if answer.status == "ok" else None
        mine = self.queue.finish(trial, told, rated)
        logger.info(
            "trial %d of %d: %s, %s: %s%s",
            self.queue.place(trial),
            self.queue.total,
            shown(trial.params),
            answer.status,
            shown({n: told[n] for n in self.names}) or f"{answer.note} ({told['log']})",
            "" if mine else "; another machine has told it before",
        )

    def _rows(self) -> list[Row]:
        """Of all machines' trials that have ended."""
        ended = [t for t in self.queue.live() if ANSWER in t.user_attrs]
        kept = one_a_place(ended, self.queue.place)
        return [_row(kept[place], place) for place in sorted(kept)]


def _ranks(spec: TrialSpec) -> Any:
    return spec.settings.train.distributed.num_processes


def _ranks_of(folder: Path) -> Any:
    """Of the training whose answer lies there: memory that one GPU has not may be
    that of two."""
    return _ranks(TrialSpec.from_json(json.loads((folder / SPEC).read_text())["spec"]))


def one_a_place(
    ended: Iterable[FrozenTrial], place: Callable[[FrozenTrial], int]
) -> dict[int, FrozenTrial]:
    """Of a combination that was tried twice: what ended well, then the newer trial."""

    def worth(trial: FrozenTrial) -> tuple[bool, int]:
        return trial.user_attrs[ANSWER]["status"] == "ok", trial.number

    return {place(trial): trial for trial in sorted(ended, key=worth)}


def _row(trial: FrozenTrial, place: int) -> Row:
    answer = dict(trial.user_attrs[ANSWER])
    begun = trial.datetime_start
    return {
        "trial_id": f"{place:03d}",
        **trial.params,
        **answer,
        "machine": trial.user_attrs.get(MACHINE, {}).get("host", ""),
        "begun_s": begun.timestamp() if begun else None,
    }


def _number(value: Any) -> Any:
    """Storages keep JSON, which has no NaN."""
    return value if value is None or math.isfinite(value) else None


def shown(values: Mapping[str, Any]) -> str:
    """`train.learning_rate=0.001, train.global_batch_size=16`, without what is None."""
    return ", ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in values.items()
        if value is not None
    )
