"""Runs the trials of a sweep, one a device, and keeps what they gave."""

from __future__ import annotations

import json
import logging
import math
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.engine.benchmark.trials.processes import KEPT, Answer, ask, kept_answer
from flatout.engine.benchmark.trials.trial import TRAINING
from flatout.engine.benchmark.trials.trial_spec import TrialSpec, with_changes
from flatout.engine.files.checked_paths import write_text
from flatout.engine.launch.job_files import JobFiles
from flatout.engine.machine.environment import gpu_names, only_gpu
from flatout.engine.parameters import Settings
from flatout.engine.sweep.samplers import Changes, Sampler, check_sweep

logger = logging.getLogger(__name__)

FORMAT = 1
"""Raised when a trial's answer changes its meaning: older answers are not taken."""

FIGURES = ("validation_loss", "validation_accuracy", "samples_per_s")
FACTS = ("steps", "train_wall_s", "device")

Row = dict[str, Any]
"""A line of sweep_trials.csv."""


def run_sweep(settings: Settings, files: JobFiles) -> list[Row]:
    """A line a trial, in the order of the sampler. Raises SettingsError."""
    check_sweep(settings)
    folder = Path(settings.sweep.folder)
    folder.mkdir(parents=True, exist_ok=True)
    sampler = Sampler(settings.sweep, settings.runtime.seed, _past(folder))
    return Sweep(settings, files, folder, sampler).run(gpu_names() or [None])


def _past(folder: Path) -> list[Changes]:
    """The settings of all trials that were begun under `folder`, in order."""
    found = [json.loads(path.read_text()) for path in folder.glob("*/begun.json")]
    return [f["changes"] for f in sorted(found, key=lambda begun: begun["begun_s"])]


@dataclass
class Sweep:
    settings: Settings
    files: JobFiles
    folder: Path
    """A sub-folder a trial: spec.json, log.txt, answer.json."""
    sampler: Sampler
    _rows: dict[str, Row] = field(default_factory=dict)
    """By key: settings that are suggested twice are one trial, at one time."""
    _alone: dict[str, threading.Lock] = field(
        default_factory=lambda: defaultdict(threading.Lock)
    )
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self, devices: Sequence[str | None]) -> list[Row]:
        """Each device takes the next trial as soon as it is free."""
        with ThreadPoolExecutor(len(devices)) as pool:
            works = [pool.submit(self._work, device) for device in devices]
            try:
                for work in wait(works, return_when=FIRST_EXCEPTION).done:
                    work.result()
            except BaseException:  # Ctrl-C ends the other devices' trials too
                self._stop.set()
                raise
        return sorted(self._rows.values(), key=lambda row: str(row["trial_id"]))

    def _work(self, device: str | None) -> None:
        while not self._stop.is_set():
            with self._turn:
                trial = self.sampler.ask()
                if trial is None:
                    return
                spec = self._spec(trial.params)
                key = spec.key({"data": self.files.data_key, "format": FORMAT})
                number = f"{len(self._rows) + 1:03d}"
                row = self._rows.setdefault(key, {"trial_id": number, **trial.params})
                alone = self._alone[key]
            with alone:
                answer = self._answer(spec, trial.params, self.folder / key, device)
            with self._turn:
                self._ended(trial, row, answer, key)

    def _spec(self, changes: Changes) -> TrialSpec:
        alone = {"train.distributed.num_processes": 1, "train.resume": "auto"}
        settings = with_changes(self.settings, {**changes, **alone})
        return TrialSpec("train", "sweep", settings)

    def _answer(
        self, spec: TrialSpec, changes: Changes, folder: Path, device: str | None
    ) -> Answer:
        """Kept from before, or of a training now; weights are not kept."""
        _note_begun(folder, changes)
        answer = kept_answer(folder) or ask(
            spec,
            self.files,
            folder,
            self.settings.sweep.trial_timeout_s or math.inf,
            self.settings.benchmark.memory_headroom,
            only_gpu(device),
            self._stop,
        )
        if answer.status in KEPT:
            shutil.rmtree(folder / TRAINING, ignore_errors=True)
        return answer

    def _ended(self, trial: Any, row: Row, answer: Answer, key: str) -> None:
        figures = {name: answer.figures.get(name) for name in (*FIGURES, *FACTS)}
        value = figures[self.settings.sweep.choose_by]
        finite = value is not None and math.isfinite(value)
        self.sampler.tell(trial, value if finite else None)
        row |= {name: figures[name] for name in FIGURES}
        row |= {"status": answer.status, "note": answer.note}
        row |= {name: figures[name] for name in FACTS}
        log = str((self.folder / key / "log.txt").absolute())
        row |= {"elapsed_s": answer.elapsed_s, "key": key, "log": log}
        logger.info(
            "trial %s of %d: %s, %s: %s",
            row["trial_id"],
            self.sampler.total,
            shown(trial.params),
            answer.status,
            shown({n: figures[n] for n in FIGURES}) or f"{answer.note} ({log})",
        )


def shown(values: Mapping[str, Any]) -> str:
    """`train.learning_rate=0.001, train.global_batch_size=16`, without what is None."""
    return ", ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in values.items()
        if value is not None
    )


def _note_begun(folder: Path, changes: Changes) -> None:
    """For a sweep that goes on where this one is stopped."""
    folder.mkdir(exist_ok=True)
    begun = folder / "begun.json"
    if not begun.exists():
        fields = {"begun_s": time.time(), "changes": dict(changes)}
        write_text(begun, json.dumps(fields))
