"""The sweep's own state: trials run, kept, taken up again after a kill."""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from flatout.engine.bench.recommend import versions
from flatout.engine.bench.trial_spec import (
    Kind,
    Measure,
    TrialResult,
    TrialSpec,
    with_changes,
)
from flatout.engine.bench.trials import (
    Answer,
    one_gpu,
    resident_limit_bytes,
    run_isolated,
)
from flatout.engine.bench.watching import Unwatched, Watcher
from flatout.engine.environment import device_name, nvidia_gpu_count
from flatout.engine.flops import peak_tflops
from flatout.engine.jobs.checkpoint_folder import write_text_whole
from flatout.engine.jobs.job_files import JobFiles
from flatout.engine.jobs.launch import resolve_processes
from flatout.engine.settings import BenchmarkSettings, Settings
from flatout.engine.tokens import TokenRows

logger = logging.getLogger(__name__)

KEPT = frozenset({"ok", "oom"})
"""Answers that an interrupted sweep does not ask for again."""
TUNE_MINUTES_CPU, TUNE_MINUTES_GPU = 5.0, 15.0
"""Of mode tune's time to explore. On an H200 a trial that compiles takes 45 to 60 s;
with what earlier ones left on the disk its dozen trials took 290 s."""
PEER_TIMEOUTS = 12
"""`trial_timeout_s` that a whole training may take."""


class OutOfTime(Exception):
    """`benchmark.max_minutes` is over: what was measured is kept, no trial begins."""


@dataclass(frozen=True)
class Lengths:
    """Of the train rows, in tokens."""

    mean_tokens: float
    longest: int


@dataclass
class Bench:
    """Runs trials of one sweep and keeps what they gave.

    An interrupted sweep leaves `sweep.json` saying so; the next one of the same mode
    takes up its answers. A finished sweep is measured anew.
    """

    settings: Settings
    files: JobFiles
    folder: Path
    """A sub-folder a trial: spec.json, log.txt, result.json."""
    watcher: Watcher = field(default_factory=Unwatched)
    results: list[TrialResult] = field(default_factory=list)
    figures: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """All that a trial measured, by trial_id."""
    asked: dict[str, Settings] = field(default_factory=dict)
    """The settings of each, by trial_id."""
    reused: int = 0
    profile: dict[str, Any] | None = None
    """Files that the profile of the chosen trial left."""
    begin_s: float = field(default_factory=time.perf_counter)

    @cached_property
    def _rows(self) -> TokenRows:
        return TokenRows.open(Path(self.files.train))

    @property
    def train_rows(self) -> int:
        return len(self._rows)

    @cached_property
    def lengths(self) -> Lengths:
        all_lengths = self._rows.all_lengths
        return Lengths(float(all_lengths.mean()), int(all_lengths.max()))

    @cached_property
    def processes(self) -> int:
        """Devices of this machine that training will use."""
        return resolve_processes(self.settings.train.distributed)

    @cached_property
    def device(self) -> str:
        return device_name()

    @property
    def peak_tflops(self) -> float | None:
        """Of one device: from its data sheet, else as a trial has measured it."""
        measured = [f.get("peak_tflops_measured") for f in self.figures.values()]
        known = [value for value in measured if value]
        return peak_tflops(self.device) or (known[0] if known else None)

    def _peak_in(self, precision: str | None) -> float | None:
        """None where the peak was measured in another precision."""
        measured = [f for f in self.figures.values() if "peak_tflops_measured" in f]
        other = measured and measured[0].get("precision", precision) != precision
        known = peak_tflops(self.device)
        return known if known or other else self.peak_tflops

    @property
    def memory_gib(self) -> float | None:
        """The device's own, or the machine's."""
        known = [f["memory_gib"] for f in self.figures.values() if "memory_gib" in f]
        return known[0] if known else None

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.begin_s

    def explored(self, share: float = 1.0) -> bool:
        """Whether `share` of mode tune's time is over: confirm what there is."""
        minutes = self.options.tune_minutes
        if minutes == "auto":
            minutes = TUNE_MINUTES_GPU if nvidia_gpu_count() else TUNE_MINUTES_CPU
        return self.options.mode == "tune" and self.elapsed_s > 60 * share * minutes

    @property
    def options(self) -> BenchmarkSettings:
        return self.settings.benchmark

    def start(self) -> None:
        """Make the folder ready: kept where a sweep was cut short, else empty."""
        state = self.folder / "sweep.json"
        interrupted = _says_running(state)
        if self.folder.exists() and not (interrupted and self.options.resume):
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        fields = {"running": True, "started_s": time.time()}
        write_text_whole(state, json.dumps(fields))
        self.begin_s = time.perf_counter()

    def finish(self) -> None:
        """Nothing is left to do: the next sweep begins anew."""
        write_text_whole(self.folder / "sweep.json", json.dumps({"running": False}))

    def run(
        self,
        kind: Kind,
        changes: Mapping[str, Any] | None = None,
        *,
        label: str = "",
        world_size: int | None = None,
        options: Mapping[str, Any] | None = None,
        base: Settings | None = None,
    ) -> TrialResult:
        """Run one trial: `base` (the sweep's settings) with `changes` by path. Steps
        run on as many devices as training will, unless `world_size` says otherwise.
        Raises OutOfTime."""
        settings = with_changes(base or self.settings, changes or {})
        spec = TrialSpec(
            kind=kind,
            mode=self.options.mode,
            settings=settings,
            measure=self._measure(),
            label=label,
            world_size=world_size or self._world_size(kind),
            options=dict(options or {}),
        )
        key = spec.key(self._context())
        answer = self._refused(spec) or self._kept(key)
        if answer is None and self.results and self._is_over:
            raise OutOfTime
        trial = TrialResult.asked(spec, f"{len(self.results) + 1:03d}", key)
        self.asked[trial.trial_id] = settings
        self.watcher.begins(trial)
        answer = answer or self._answer(spec, key)
        trial = self._filled(trial, answer)
        self.results.append(trial)
        self.figures[trial.trial_id] = answer.figures
        self.watcher.ends(trial)
        return trial

    @property
    def _is_over(self) -> bool:
        return self.elapsed_s > 60 * (self.options.max_minutes or math.inf)

    def _kept(self, key: str) -> Answer | None:
        """What an interrupted sweep has already asked."""
        file = self.folder / key / "answer.json"
        if not file.exists():
            return None
        answer = Answer(**json.loads(file.read_text()))
        if answer.status not in KEPT:
            return None
        self.reused += 1
        return answer

    def _world_size(self, kind: Kind) -> int:
        return self.processes if kind in ("end_to_end", "compute") else 1

    def _measure(self) -> Measure:
        options = self.options
        return Measure(
            steps=options.steps_per_trial,
            warmup_steps=options.warmup_steps,
            repeats=options.repeats,
            min_window_s=options.min_window_s,
            max_window_s=options.max_window_s,
            headroom=options.memory_headroom,
            slow_rows_ms=options.slow_rows_ms,
        )

    def _context(self) -> dict[str, Any]:
        return {
            "data": self.files.data_key,
            "device": self.device,
            "versions": versions(),
        }

    def _refused(self, spec: TrialSpec) -> Answer | None:
        """What cannot be measured needs no process to say so."""
        rows, batch = self.train_rows, spec.settings.train.global_batch_size
        if batch <= rows:
            return None
        note = f"global batch {batch} is larger than the data ({rows} train rows)"
        return Answer("error", note, 0.0, {})

    def _answer(self, spec: TrialSpec, key: str) -> Answer:
        folder = self.folder / key
        folder.mkdir(exist_ok=True)
        asked = {"spec": spec.as_json(), "job": asdict(self.files)}
        (folder / "spec.json").write_text(json.dumps(asked, indent=1))
        answer = run_isolated(
            spec,
            folder,
            self._timeout_s(spec.kind),
            resident_limit_bytes(self.options.memory_headroom),
            variables=one_gpu(spec.world_size),
        )
        part = folder / "answer.json.part"
        part.write_text(json.dumps(asdict(answer)))
        part.replace(folder / "answer.json")
        return answer

    def _timeout_s(self, kind: Kind) -> float:
        """A contender trains the whole, not some windows."""
        longer = PEER_TIMEOUTS if kind == "peer" else 1
        return longer * self.options.trial_timeout_s

    def _filled(self, trial: TrialResult, answer: Answer) -> TrialResult:
        tflops = answer.figures.get("tflops_per_s")
        peak = self._peak_in(answer.figures.get("precision"))
        share = 100 * tflops / peak if tflops and peak else None
        log = self.folder / trial.key / "log.txt"
        return trial.answered(
            {
                **answer.figures,
                "mfu_pct": share,
                "status": answer.status,
                "note": answer.note,
                "elapsed_s": answer.elapsed_s,
                "log": str(log) if log.exists() else "",  # of one refused: none
            }
        )


def _says_running(state: Path) -> bool:
    """Whether a sweep was cut short."""
    if not state.exists():
        return False
    try:
        return bool(json.loads(state.read_text())["running"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is damaged (%s): the sweep is measured anew", state, error)
        return False
