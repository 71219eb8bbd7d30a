"""Run the benchmark in one of its modes. The mode decides which trials to run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from flatout.engine.benchmark.ladder import Step, ladder
from flatout.engine.benchmark.recommend import PICKS, pick
from flatout.engine.benchmark.rungs import BATCH
from flatout.engine.benchmark.runner import Bench, Watch
from flatout.engine.benchmark.trials.trial_spec import Changes, TrialResult
from flatout.engine.benchmark.tune import CONFIGURED, Tuned, tune
from flatout.engine.launch.job_files import JobFiles
from flatout.engine.machine.environment import nvidia_gpu_count
from flatout.engine.parameters import Settings

logger = logging.getLogger(__name__)

ADVISES = frozenset({"tune", "grid"})
"""Modes that recommend settings to the user."""


@dataclass
class Search:
    """The results of a benchmark."""

    bench: Bench
    ladder: list[Step] = field(default_factory=list)
    tuned: Tuned | None = None
    skipped: list[Changes] = field(default_factory=list)
    """Combinations skipped because they ran out of memory with a smaller batch."""

    @property
    def configured(self) -> TrialResult | None:
        """The end-to-end trial with the original settings, or None."""
        found = (t for t in self.bench.results if t.label == CONFIGURED)
        return next(found, None)

    @property
    def picks(self) -> dict[str, TrialResult | None]:
        """The trials that `recommend.pick` chooses, by name. All are None if the mode
        makes no recommendations."""
        bench, options = self.bench, self.bench.options
        if options.mode not in ADVISES:
            return dict.fromkeys(PICKS)
        return pick(
            [t for t in bench.results if t.world_size == bench.processes],
            bench.settings.train.global_batch_size,
            memory_gib=bench.memory_gib,
            headroom=options.memory_headroom,
            free_global_batch=options.free_global_batch,
            rate_of=self.rate_of,
        )

    @property
    def recommended(self) -> TrialResult | None:
        return self.picks["recommended"]

    def rate_of(self, trial: TrialResult) -> float:
        """Return a trial's samples/s. If it alternated with the configured settings,
        this is scaled to the host's speed during the configured trial."""
        if self.tuned is None or trial.times_below is None:
            return trial.rate
        return float(trial.times_below * self.tuned.configured.rate)


def search(
    settings: Settings,
    files: JobFiles,
    watch: Watch | None = None,
) -> Search:
    """Run the mode chosen in the settings, and call `watch` after each trial."""
    options = settings.benchmark
    folder = Path(options.folder) / options.mode
    bench = Bench(settings, files, folder, watch)
    bench.start()
    found = Search(bench)
    MODES[options.mode](found)
    if options.profile:
        profile_best(found)
    bench.finish()
    return found


def profile_best(search: Search) -> None:
    """Profile the recommended trial, falling back to the fastest end-to-end trial, then
    to the configured settings."""
    bench = search.bench
    rated = [t for t in bench.results if t.ok and t.kind == "end_to_end"]
    fastest = max(rated, key=lambda trial: trial.rate, default=None)
    best = search.recommended or fastest
    base = best.spec.settings if best else None
    trial = bench.run("profile", base=base, label="profile")
    bench.profile = {
        "of": (best or trial).trial_id,
        "files": trial.figures.get("files", {}),
        "note": trial.note,
    }


def run_grid(search: Search) -> None:
    """Run every combination of the values in the `benchmark` parameters end to end,
    unless the same values with a smaller batch ran out of memory."""
    bench = search.bench
    plan = _combinations(bench)
    logger.info("%d combinations", len(plan))
    bench.run("end_to_end", label=CONFIGURED)
    full: list[Changes] = []
    for changes in plan:
        if _is_beyond(changes, full):
            search.skipped.append(changes)
        elif bench.run("end_to_end", changes).status == "oom":
            full.append(changes)


def _is_beyond(changes: Mapping[str, Any], full: Iterable[Changes]) -> bool:
    """Return whether a smaller batch with otherwise equal changes ran out of memory."""
    rest = {**changes, BATCH: None}
    return any(
        {**one, BATCH: None} == rest and one[BATCH] < changes[BATCH] for one in full
    )


def _combinations(bench: Bench) -> list[Changes]:
    options = bench.options
    axes: dict[str, Sequence[Any]] = {
        BATCH: sorted(options.batch_sizes),
        "train.loader.num_workers": options.num_workers,
        "train.loader.prefetch_factor": options.prefetch_factors,
        "train.loader.pin_memory": options.pin_memory if nvidia_gpu_count() else [],
        "runtime.precision": options.precisions,
        "train.batching": options.strategies,
        "train.token_budget": options.token_budgets or ["auto"],
    }
    if options.precisions == ["auto"]:  # keep the configured precision
        del axes["runtime.precision"]
    if bench.rows.one_shape:  # no padding
        del axes["train.batching"]
    axes = {name: values for name, values in axes.items() if values}
    combinations = (dict(zip(axes, v, strict=True)) for v in product(*axes.values()))
    first = options.prefetch_factors[:1]  # has no effect if there are no workers
    return [
        changes
        for changes in combinations
        if changes["train.loader.num_workers"]
        or changes.get("train.loader.prefetch_factor") in (*first, None)
    ]


def run_tune(search: Search) -> None:
    search.tuned = tune(search.bench)


def run_ladder(search: Search) -> None:
    for step in ladder(search.bench):  # a row that is yielded again replaces the first
        search.ladder[step.rung : step.rung + 1] = [step]


MODES: dict[str, Callable[[Search], None]] = {
    "tune": run_tune,
    "grid": run_grid,
    "ladder": run_ladder,
}
