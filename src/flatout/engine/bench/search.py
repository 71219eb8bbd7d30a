"""Which trial next: the modes of the benchmark, and what a sweep comes to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from flatout.engine.bench.bench import Bench
from flatout.engine.bench.ladder import Step, ladder
from flatout.engine.bench.tune import Tuned, tune, worker_counts
from flatout.engine.bench.watching import Unwatched, Watcher
from flatout.engine.environment import nvidia_gpu_count, usable_cores
from flatout.engine.jobs.job_files import JobFiles
from flatout.engine.settings import Settings

logger = logging.getLogger(__name__)


@dataclass
class Sweep:
    """A finished (or cut) sweep."""

    bench: Bench
    ladder: list[Step] = field(default_factory=list)
    tuned: Tuned | None = None
    complete: bool = True


def search(
    settings: Settings, files: JobFiles, watcher: Watcher | None = None
) -> Sweep:
    """Run the mode that the settings ask for."""
    options = settings.benchmark
    folder = Path(options.folder) / options.mode
    bench = Bench(settings, files, folder, watcher or Unwatched())
    bench.start()
    sweep = Sweep(bench)
    sweep.complete = MODES[options.mode](sweep)
    if options.profile:
        profile_best(sweep)
    if sweep.complete:
        bench.finish()
    else:
        logger.warning(
            "benchmark.max_minutes=%g is over: %d trials are done; the same command "
            "goes on with the rest",
            options.max_minutes,
            len(bench.results),
        )
    return sweep


def profile_best(sweep: Sweep) -> None:
    """Profile the fastest training of the sweep; as configured where there is none."""
    bench = sweep.bench
    rated = [t for t in bench.results if t.ok and t.kind == "end_to_end"]
    best = max(rated, key=lambda trial: trial.samples_per_s or 0.0, default=None)
    base = bench.asked[best.trial_id] if best else None
    trial = bench.run("profile", base=base, label="profile")
    bench.profile = {
        "of": best.trial_id if best else trial.trial_id,
        "files": bench.figures[trial.trial_id].get("files", {}),
        "note": trial.note,
    }


def run_grid(sweep: Sweep) -> bool:
    """Guide E's exhaustive sweep: every combination of the lists, end to end."""
    bench, options = sweep.bench, sweep.bench.options
    axes: dict[str, Sequence[Any]] = {
        "train.global_batch_size": options.batch_sizes,
        "train.loader.num_workers": options.num_workers,
        "runtime.precision": options.precisions,
        "train.strategy": options.strategies,
        "train.token_budget": options.token_budgets or ["auto"],
    }
    combinations = list(product(*axes.values()))
    bench.watcher.expect(len(combinations) + 1)
    bench.run("device", label="the device's peak")
    for values in combinations:
        if bench.out_of_time():
            return False
        bench.run("end_to_end", dict(zip(axes, values, strict=True)))
    return True


def run_tune(sweep: Sweep) -> bool:
    sweep.tuned = tune(sweep.bench)
    return True


def run_ladder(sweep: Sweep) -> bool:
    sweep.ladder, complete = ladder(sweep.bench)
    return complete


def run_loader(sweep: Sweep) -> bool:
    """The loader alone, over the counts of workers; and its slow batches."""
    bench = sweep.bench
    counts = sorted(set(worker_counts()) | set(bench.options.num_workers))
    bench.watcher.expect(len(counts))
    for workers in counts:
        if bench.out_of_time():
            return False
        changes = {"train.loader.num_workers": workers}
        bench.run("loader", changes, label=f"{workers} workers")
    return True


def run_scaling(sweep: Sweep) -> bool:
    """1, 2, 4, ... devices at the same global batch; without GPUs, processes that
    share the cores."""
    bench = sweep.bench
    most = nvidia_gpu_count() or min(2, usable_cores())
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= most]
    bench.watcher.expect(len(sizes))
    for size in sizes:
        if bench.out_of_time():
            return False
        bench.run("end_to_end", world_size=size, label=f"devices: {size}")
    return True


def run_peers(sweep: Sweep) -> bool:
    """flatout and the Hugging Face Trainer, each training the same whole."""
    bench = sweep.bench
    contenders = ["flatout", "trainer-default", "trainer-best"]
    if nvidia_gpu_count():
        contenders.append("trainer-best-compiled")
    bench.watcher.expect(len(contenders))
    for name in contenders:
        if bench.out_of_time():
            return False
        bench.run("peer", options={"contender": name}, label=name)
    return True


MODES: dict[str, Callable[[Sweep], bool]] = {
    "tune": run_tune,
    "grid": run_grid,
    "ladder": run_ladder,
    "loader": run_loader,
    "peers": run_peers,
    "scaling": run_scaling,
}
