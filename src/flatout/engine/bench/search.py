"""Which trial next: the modes of the benchmark, and what a sweep comes to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from flatout.engine.bench.bench import Bench, OutOfTime
from flatout.engine.bench.budgets import Changes, SafeBudget
from flatout.engine.bench.contests import compete, peer_contests
from flatout.engine.bench.headline import headline_contests
from flatout.engine.bench.ladder import Step, ladder
from flatout.engine.bench.recommend import Picks, pick
from flatout.engine.bench.trial_spec import TrialResult
from flatout.engine.bench.tune import Tuned, check_memory, tune, worker_counts
from flatout.engine.bench.watching import Unwatched, Watcher
from flatout.engine.environment import nvidia_gpu_count, usable_cores
from flatout.engine.jobs.job_files import JobFiles
from flatout.engine.settings import Settings

logger = logging.getLogger(__name__)

ADVISES = frozenset({"tune", "grid"})
"""Modes that recommend settings for the user's own training."""


@dataclass
class Sweep:
    """A finished (or cut) sweep."""

    bench: Bench
    ladder: list[Step] = field(default_factory=list)
    tuned: Tuned | None = None
    configured: TrialResult | None = None
    """End to end with the settings as they were; of modes that advise."""
    memory: SafeBudget = field(default_factory=SafeBudget)
    complete: bool = True

    @property
    def picks(self) -> Picks:
        """Of the user's own training; none in modes that only compare, nor of a sweep
        that was cut short: its memory may not have been asked yet."""
        bench, options = self.bench, self.bench.options
        if options.mode not in ADVISES or not self.complete:
            return Picks(None, None, None)
        longest = bench.lengths.longest
        return pick(
            [t for t in bench.results if t.world_size == bench.processes],
            bench.settings.train.global_batch_size,
            memory_gib=bench.memory_gib,
            headroom=options.memory_headroom,
            free_global_batch=options.free_global_batch,
            holds=lambda trial: self.memory.holds(trial, longest),
        )


def search(
    settings: Settings, files: JobFiles, watcher: Watcher | None = None
) -> Sweep:
    """Run the mode that the settings ask for."""
    options = settings.benchmark
    folder = Path(options.folder) / options.mode
    bench = Bench(settings, files, folder, watcher or Unwatched())
    bench.start()
    sweep = Sweep(bench)
    try:
        MODES[options.mode](sweep)
        if options.profile:
            profile_best(sweep)
        bench.finish()
    except OutOfTime:
        sweep.complete = False
        logger.warning(
            "benchmark.max_minutes=%g is over: %d trials are done; the same command "
            "goes on with the rest",
            options.max_minutes,
            len(bench.results),
        )
    return sweep


def profile_best(sweep: Sweep) -> None:
    """Profile the recommended training of the sweep, else the fastest; as configured
    where there is none."""
    bench = sweep.bench
    rated = [t for t in bench.results if t.ok and t.kind == "end_to_end"]
    fastest = max(rated, key=lambda trial: trial.samples_per_s or 0.0, default=None)
    best = sweep.picks.recommended or (fastest.trial_id if fastest else None)
    base = bench.asked[best] if best else None
    trial = bench.run("profile", base=base, label="profile")
    bench.profile = {
        "of": best or trial.trial_id,
        "files": bench.figures[trial.trial_id].get("files", {}),
        "note": trial.note,
    }


def run_grid(sweep: Sweep) -> None:
    """Guide E's exhaustive sweep: every combination of the lists, end to end."""
    bench, options = sweep.bench, sweep.bench.options
    axes: dict[str, Sequence[Any]] = {
        "train.global_batch_size": options.batch_sizes,
        "train.loader.num_workers": options.num_workers,
        "runtime.precision": options.precisions,
        "train.strategy": options.strategies,
        "train.token_budget": options.token_budgets or ["auto"],
    }
    if options.precisions == ["auto"]:  # the user's own
        del axes["runtime.precision"]
    combinations = list(product(*axes.values()))
    bench.watcher.expect(len(combinations) + 4)
    bench.run("device", label="the device's peak")
    sweep.configured = bench.run("end_to_end", label="as configured")
    by_trial: dict[str, Changes] = {}
    for values in combinations:
        changes = dict(zip(axes, values, strict=True))
        by_trial[bench.run("end_to_end", changes).trial_id] = changes
    best = next((t for t in bench.results if t.trial_id == sweep.picks.fastest), None)
    if best is not None:
        changes = by_trial.get(best.trial_id, {})
        sweep.memory, _, _ = check_memory(bench, best, changes)


def run_tune(sweep: Sweep) -> None:
    sweep.tuned = tune(sweep.bench)
    if sweep.tuned is not None:
        sweep.configured, sweep.memory = sweep.tuned.configured, sweep.tuned.memory


def run_ladder(sweep: Sweep) -> None:
    for step in ladder(sweep.bench):
        sweep.ladder.append(step)


def run_loader(sweep: Sweep) -> None:
    """Steps alone, for what they take; the loader alone, over the counts of workers;
    and its slow batches."""
    bench = sweep.bench
    counts = sorted(set(worker_counts()) | set(bench.options.num_workers))
    bench.watcher.expect(1 + len(counts))
    bench.run("compute", label="steps alone")
    for workers in counts:
        changes = {"train.loader.num_workers": workers}
        bench.run("loader", changes, label=f"{workers} workers")


def run_scaling(sweep: Sweep) -> None:
    """1, 2, 4, ... devices at the same global batch; without GPUs, processes that
    share the cores."""
    bench = sweep.bench
    most = nvidia_gpu_count() or min(2, usable_cores())
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= most]
    bench.watcher.expect(len(sizes))
    for size in sizes:
        bench.run("end_to_end", world_size=size, label=f"devices: {size}")


def run_peers(sweep: Sweep) -> None:
    """flatout and the Hugging Face Trainer, each training the same whole."""
    found = peer_contests(sweep.bench)
    sweep.bench.watcher.expect(len(found))
    compete(sweep.bench, found)


def run_headline(sweep: Sweep) -> None:
    """Rates of the slow configuration, the Trainer and flatout; the device's peak
    first, for the share of it that is used."""
    found = list(headline_contests(sweep.bench))
    sweep.bench.watcher.expect(len(found) + 1)
    sweep.bench.run("device", label="the device's peak")
    compete(sweep.bench, found)


MODES: dict[str, Callable[[Sweep], None]] = {
    "tune": run_tune,
    "grid": run_grid,
    "headline": run_headline,
    "ladder": run_ladder,
    "loader": run_loader,
    "peers": run_peers,
    "scaling": run_scaling,
}
