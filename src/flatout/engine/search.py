"""Which trial next: the modes of the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from flatout.engine.bench import Bench, Unwatched, Watcher
from flatout.engine.job_files import JobFiles
from flatout.engine.settings import Settings


def grid(bench: Bench) -> None:
    """Guide E's exhaustive sweep: every combination of the lists, end to end."""
    options = bench.options
    axes: dict[str, Sequence[Any]] = {
        "train.global_batch_size": options.batch_sizes,
        "train.loader.num_workers": options.num_workers,
        "runtime.precision": options.precisions,
        "train.strategy": options.strategies,
        "train.token_budget": options.token_budgets or ["auto"],
    }
    combinations = list(product(*axes.values()))
    bench.watcher.expect(len(combinations))
    for values in combinations:
        bench.run("end_to_end", dict(zip(axes, values, strict=True)))


MODES: dict[str, Callable[[Bench], None]] = {"grid": grid}


def search(
    settings: Settings, files: JobFiles, watcher: Watcher | None = None
) -> Bench:
    """Run the mode that the settings ask for; the sweep with all its trials."""
    options = settings.benchmark
    folder = Path(options.folder) / options.mode
    bench = Bench(settings, files, folder, watcher or Unwatched())
    bench.start()
    MODES[options.mode](bench)
    bench.finish()
    return bench
