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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flatout.engine.bench.trial_spec import TrialSpec, with_changes
from flatout.engine.bench.trials import Answer, resident_limit_bytes, run_isolated
from flatout.engine.environment import gpu_names, only_gpu
from flatout.engine.jobs.job_files import JobFiles
from flatout.engine.settings import Settings
from flatout.engine.sweep.samplers import Changes, Sampler, Suggestion, open_sampler
from flatout.engine.sweep.trial import TRAINING

logger = logging.getLogger(__name__)

FORMAT = 1
"""Raised when a trial's answer changes its meaning: older answers are not taken."""

KEPT = frozenset({"ok", "oom"})
"""Answers that a sweep does not ask for again."""

FIGURES = ("validation_loss", "validation_accuracy", "samples_per_s")
FACTS = ("steps", "train_wall_s", "device")

Row = dict[str, Any]
"""A line of sweep_trials.csv."""


def run_sweep(settings: Settings, files: JobFiles) -> list[Row]:
    """A line a trial, in the order of the sampler. Raises SettingsError."""
    folder = Path(settings.sweep.folder)
    folder.mkdir(parents=True, exist_ok=True)
    sampler = open_sampler(settings, _past(folder))
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
                suggestion = self.sampler.ask()
                if suggestion is None:
                    return
                spec = self._spec(suggestion.changes)
                key = spec.key({"data": self.files.data_key, "format": FORMAT})
                row = self._begun(suggestion, key)
                alone = self._alone[key]
            with alone:
                answer = self._answer(spec, suggestion.changes, key, device)
            with self._turn:
                self._ended(suggestion, row, answer)

    def _spec(self, changes: Changes) -> TrialSpec:
        alone = {"train.distributed.num_processes": 1, "train.resume": "auto"}
        settings = with_changes(self.settings, {**changes, **alone})
        return TrialSpec("train", "sweep", settings)

    def _begun(self, suggestion: Suggestion, key: str) -> Row:
        if key in self._rows:
            return self._rows[key]
        number = f"{len(self._rows) + 1:03d}"
        row: Row = {"trial_id": number, **suggestion.changes, "key": key}
        self._rows[key] = row
        return row

    def _answer(
        self, spec: TrialSpec, changes: Changes, key: str, device: str | None
    ) -> Answer:
        """Kept from before, or of a training now."""
        folder = self.folder / key
        kept = folder / "answer.json"
        if kept.exists():
            answer = Answer(**json.loads(kept.read_text()))
            if answer.status in KEPT:
                _drop_weights(folder)
                return answer
        self._write_asked(spec, changes, folder)
        answer = run_isolated(
            spec,
            folder,
            self.settings.sweep.trial_timeout_s or math.inf,
            resident_limit_bytes(self.settings.benchmark.memory_headroom),
            variables=only_gpu(device),
            stop=self._stop,
        )
        if answer.status != "stopped":
            _write_whole(kept, asdict(answer))
        if answer.status in KEPT:
            _drop_weights(folder)
        return answer

    def _write_asked(self, spec: TrialSpec, changes: Changes, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        asked = {"spec": spec.as_json(), "job": asdict(self.files)}
        (folder / "spec.json").write_text(json.dumps(asked, indent=1))
        begun = folder / "begun.json"
        if not begun.exists():
            _write_whole(begun, {"begun_s": time.time(), "changes": dict(changes)})

    def _ended(self, suggestion: Suggestion, row: Row, answer: Answer) -> None:
        figures = {name: answer.figures.get(name) for name in (*FIGURES, *FACTS)}
        value = figures[self.settings.sweep.choose_by]
        finite = value is not None and math.isfinite(value)
        self.sampler.tell(suggestion, value if finite else None)
        row |= {name: figures[name] for name in FIGURES}
        row |= {"status": answer.status, "note": answer.note}
        row |= {name: figures[name] for name in FACTS}
        row |= {"elapsed_s": answer.elapsed_s, "key": row.pop("key")}
        row["log"] = str((self.folder / row["key"] / "log.txt").absolute())
        logger.info(
            "trial %s of %d: %s, %s: %s",
            row["trial_id"],
            self.sampler.total,
            shown(suggestion.changes),
            answer.status,
            shown({n: figures[n] for n in FIGURES}) or f"{answer.note} ({row['log']})",
        )


def shown(values: Mapping[str, Any]) -> str:
    """`train.learning_rate=0.001, train.global_batch_size=16`, without what is None."""
    return ", ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in values.items()
        if value is not None
    )


def _drop_weights(folder: Path) -> None:
    """Of a trial that has ended: its figures are kept."""
    shutil.rmtree(folder / TRAINING, ignore_errors=True)


def _write_whole(path: Path, fields: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(fields))
    part.replace(path)
