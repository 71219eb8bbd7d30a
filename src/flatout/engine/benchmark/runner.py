"""Run the trials of a benchmark, store them, and resume after an interruption."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from flatout.engine.benchmark.recommend import versions
from flatout.engine.benchmark.trials.processes import Answer, ask, stored_answer
from flatout.engine.benchmark.trials.trial_spec import (
    ON_ALL_DEVICES,
    Changes,
    TrialResult,
    TrialSpec,
    with_changes,
)
from flatout.engine.launch.job_files import JobFiles
from flatout.engine.launch.launch import resolve_processes
from flatout.engine.machine.environment import device_name, nvidia_gpu_count
from flatout.engine.models.flops import peak_tflops
from flatout.engine.parameters import BenchmarkSettings, Settings
from flatout.engine.rows.rows import SplitRows, open_rows

logger = logging.getLogger(__name__)

TUNE_MINUTES_CPU, TUNE_MINUTES_GPU = 5.0, 15.0
"""Minutes of exploration in `tune` mode. On an H200, a trial with compilation takes 45
to 60 s, and a dozen trials with a warm compilation cache took 290 s."""


Watch = Callable[[TrialResult], None]
"""A function that is called with the result of each trial."""


UNPAIRED = "unpaired"
"""Status of a trial whose reference process ended early."""
ALONE = "one after the other"
"""Note for a trial whose windows could not alternate with those of its reference."""


@dataclass
class Bench:
    """Runs the trials of one benchmark and stores their results. The folder contains a
    file `running` until the benchmark is complete. If it exists at the start, the last
    benchmark of this mode was interrupted, and its results are reused."""

    settings: Settings
    files: JobFiles
    folder: Path
    """Folder with a subfolder for each trial (spec.json, log.txt, result.json)."""
    watch: Watch | None = None
    results: list[TrialResult] = field(default_factory=list)
    reused: int = 0
    profile: dict[str, Any] | None = None
    """The ID of the profiled trial and the profile's files."""
    begin_s: float = field(default_factory=time.perf_counter)

    @cached_property
    def rows(self) -> SplitRows:
        """The rows of the training split."""
        return open_rows(Path(self.files.splits["train"]))

    @cached_property
    def processes(self) -> int:
        """The number of devices on this machine that training uses."""
        return resolve_processes(self.settings.train.distributed)

    @cached_property
    def device(self) -> str:
        return device_name()

    @property
    def memory_gib(self) -> float | None:
        """The GPU memory in GiB, or the main memory on a machine without a GPU. It is
        None until a trial has reported it."""
        reported = (t.figures.get("device_memory_gib") for t in self.results)
        return next(filter(None, reported), None)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.begin_s

    def explored(self, share: float = 1.0) -> bool:
        """Return whether the fraction `share` of the exploration time has passed (in
        `tune` mode only)."""
        minutes = self.options.tune_minutes
        if minutes == "auto":
            minutes = TUNE_MINUTES_GPU if nvidia_gpu_count() else TUNE_MINUTES_CPU
        return self.options.mode == "tune" and self.elapsed_s > 60 * share * minutes

    @property
    def options(self) -> BenchmarkSettings:
        return self.settings.benchmark

    def start(self) -> None:
        """Prepare the folder. Earlier results in the folder are removed, unless this
        benchmark resumes an interrupted one."""
        interrupted = self._running.exists()
        if self.folder.exists() and not (interrupted and self.options.resume):
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._running.touch()
        self.begin_s = time.perf_counter()

    def finish(self) -> None:
        """Mark the benchmark as complete, so that the next benchmark starts anew."""
        self._running.unlink()

    @property
    def _running(self) -> Path:
        """A file that exists while a benchmark runs or after it was interrupted."""
        return self.folder / "running"

    def run(
        self,
        kind: str,
        changes: Mapping[str, Any] | None = None,
        *,
        label: str = "",
        world_size: int | None = None,
        options: Mapping[str, Any] | None = None,
        base: Settings | None = None,
    ) -> TrialResult:
        """Run one trial, or reuse its stored result. `changes` by path are applied to
        `base`, by default the benchmark's settings. Steps run on as many devices as
        training uses, unless `world_size` is given."""
        settings = with_changes(base or self.settings, changes or {})
        spec = TrialSpec(
            kind=kind,
            mode=self.options.mode,
            settings=settings,
            label=label,
            world_size=world_size or (self.processes if kind in ON_ALL_DEVICES else 1),
            options=dict(options or {}),
        )
        context = {"device": self.device, "versions": versions()}
        key = spec.key({"data": self.files.data_key, **context})
        kept = stored_answer(self.folder / key)
        self.reused += kept is not None
        answer = self._refused(spec) or kept or self._answer(spec, key)
        trial = self._filled(spec, key, answer)
        self.results.append(trial)
        if self.watch:
            self.watch(trial)
        return trial

    def compare(
        self, base: Settings, number: int, label: str, changes: Changes, below: Changes
    ) -> tuple[TrialResult, float | None]:
        """Compare `changes` with `below`, both applied to `base`, on one device. Return
        the end-to-end trial of `changes`, and its throughput relative to `below`. The
        windows of the two processes alternate, unless both do not fit into memory
        together."""
        reference = with_changes(base, below)
        stored = reference.model_dump(mode="json", exclude={"benchmark", "sweep"})
        run = partial(self.run, "end_to_end", base=base, world_size=1)
        trial = run(changes, label=label, options={"below": stored})
        if trial.status not in ("oom", UNPAIRED):
            return trial, trial.times_below
        again = {"again": number}
        under = run(below, label="the reference, alone", options=again)
        alone = run(changes, label=f"{label}, alone", options=again)
        note = "; ".join(filter(None, (alone.note, ALONE)))
        times = alone.rate / under.rate if alone.rate and under.rate else None
        return replace(alone, note=note), times

    def _refused(self, spec: TrialSpec) -> Answer | None:
        """Return an error result if the trial needs more rows than the data has."""
        rows, batch = len(self.rows), spec.settings.train.global_batch_size
        if batch <= rows:
            return None
        note = f"global batch {batch} is larger than the data ({rows} train rows)"
        return Answer("error", note, 0.0, {})

    def _answer(self, spec: TrialSpec, key: str) -> Answer:
        return ask(
            spec,
            self.files,
            self.folder / key,
            self.options.trial_timeout_s,
            self.options.memory_headroom,
            {},
        )

    def _filled(self, spec: TrialSpec, key: str, answer: Answer) -> TrialResult:
        figures = dict(answer.figures)
        tflops, peak = figures.get("tflops_per_s"), peak_tflops(self.device)
        figures["mfu_pct"] = 100 * tflops / peak if tflops and peak else None
        log = self.folder / key / "log.txt"
        return TrialResult(
            f"{len(self.results) + 1:03d}",
            spec,
            key,
            status=answer.status,
            note=answer.note,
            elapsed_s=answer.elapsed_s,
            log=str(log) if log.exists() else "",  # empty for a rejected trial
            figures=figures,
        )
