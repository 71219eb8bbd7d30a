"""tune: the best settings from few trials.

Compute alone over strategies, budgets and step options; the loader alone over
workers; then the crossing, end to end. What a budget may hold is asked of the memory
with the longest rows. The global batch is the user's unless it is set free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.engine.benchmark.budgets import (
    Changes,
    SafeBudget,
    falling_budgets,
    largest_budget,
    rising_budgets,
)
from flatout.engine.benchmark.runner import Bench
from flatout.engine.benchmark.trials.trial_spec import TrialResult
from flatout.engine.machine.environment import nvidia_gpu_count, usable_cores

CONFIGURED = "as configured"
"""Label of the trial end to end with the settings as they were."""
GAIN = 1.02
"""A change is taken where it gains at least this much: more than noise."""
LOADER_MARGIN = 1.5
"""The loader alone must be this much faster than the steps."""
FREE_LOADER = 20.0
"""So much faster, and no worker is needed: making batches costs under 5 % of a step."""
EXPLORING_SHARE = 0.6
"""Share of the time limit for exploring; the rest is for what must be confirmed."""
EXPECTED_TRIALS = 12
BATCH_GROWTH = 1.03
"""A larger free global batch must gain so much."""


@dataclass
class Tuned:
    """What the search came to. Trials are those of the sweep."""

    configured: TrialResult
    """End to end with the settings as they were."""
    chosen: TrialResult
    changes: Changes
    memory: SafeBudget = field(default_factory=SafeBudget)
    free: TrialResult | None = None
    """The best beyond the user's global batch."""
    free_note: str = ""
    """Why the search beyond it ended."""


def tune(bench: Bench) -> Tuned | None:
    """None where nothing runs, not even one row at a time."""
    bench.watcher.expect(EXPECTED_TRIALS)
    bench.run("device", label="the device's peak")
    configured = bench.run("end_to_end", label=CONFIGURED)
    changes = _runnable(bench, configured)
    if changes is None:
        return None
    changes = explore_steps(bench, changes)
    chosen, changes = cross(bench, changes, configured)
    if chosen is None:
        return None
    memory, chosen, changes = check_memory(bench, chosen, changes)
    tuned = Tuned(configured, chosen, changes, memory)
    if bench.processes > 1:
        bench.run("end_to_end", changes, world_size=1, label="one device alone")
    if bench.options.free_global_batch:
        free_batch(bench, tuned)
    return tuned


def _runnable(bench: Bench, configured: TrialResult) -> Changes | None:
    """Changes that make the configured settings run at all; None where none does."""
    if configured.status == "oom":
        budget = largest_budget(bench, {}).max_token_budget
        return {"train.token_budget": budget} if budget else None
    return {} if configured.ok else None


def explore_steps(bench: Bench, changes: Changes) -> Changes:
    """Compute alone, one setting after the other, each kept where it gains."""
    best = bench.run("compute", changes, label="compute alone, as configured")
    if not best.ok:
        return changes
    for name, candidates in _axes(bench, best):
        for value in candidates:
            if bench.explored(EXPLORING_SHARE):
                return changes
            attempt = {**changes, name: value}
            label = f"compute alone, {name.split('.')[-1]} {value}"
            trial = bench.run("compute", attempt, label=label)
            if not gains(trial, best):
                break
            changes, best = attempt, trial
    return changes


def _axes(bench: Bench, first: TrialResult) -> Iterable[tuple[str, Iterable[Any]]]:
    """Settings of a step, with values to try in order; the first loss ends an axis."""
    configured = first.strategy
    one_shape = bench.settings.train.rows != "tokens"
    for strategy in () if one_shape else bench.options.strategies:
        if strategy != configured:
            yield "train.batching", [strategy]
    if len(bench.options.precisions) > 1:
        for precision in bench.options.precisions:
            if precision not in (first.precision, "auto"):
                yield "runtime.precision", [precision]
    yield "train.token_budget", falling_budgets(bench, first)
    yield "train.token_budget", rising_budgets(bench, first)
    distributed = bench.settings.train.distributed
    reduces = bench.processes > 1 and distributed.strategy == "ddp"
    # Graphs all-reduce all gradients at once anyhow.
    if reduces and distributed.bucket_mib != "all" and first.cuda_graphs is not True:
        yield "train.distributed.bucket_mib", ["all"]
    if nvidia_gpu_count():
        yield "train.compile", [not first.compile]
        yield "train.cuda_graphs", [not first.cuda_graphs]


def gains(trial: TrialResult, best: TrialResult) -> bool:
    if not trial.ok or not trial.samples_per_s:
        return False
    return trial.samples_per_s >= GAIN * (best.samples_per_s or 0.0)


def check_memory(
    bench: Bench, chosen: TrialResult, changes: Changes
) -> tuple[SafeBudget, TrialResult, Changes]:
    """Find what the memory holds; a chosen budget above it is measured again below."""
    # One process searches: with its whole batch it might come to another `auto`.
    graphs = {"train.cuda_graphs": chosen.cuda_graphs}
    memory = largest_budget(bench, {**changes, **graphs})
    nothing_fits = memory.max_token_budget == 0
    if nothing_fits or memory.holds(chosen, bench.longest):
        return memory, chosen, changes
    below = {**changes, "train.token_budget": memory.max_token_budget}
    label = f"budget {memory.max_token_budget}: safe"
    trial = bench.run("end_to_end", below, label=label)
    return (memory, trial, below) if trial.ok else (memory, chosen, changes)


def cross(
    bench: Bench, changes: Changes, configured: TrialResult
) -> tuple[TrialResult | None, Changes]:
    """The best step options with the workers that feed them, end to end."""
    best: TrialResult | None = configured if configured.ok else None
    best_changes: Changes = {}
    for workers in enough_workers(bench, changes):
        if workers in (None, configured.num_workers):
            attempt = changes
        else:
            attempt = {**changes, "train.loader.num_workers": workers}
        if not attempt and best is not None:
            continue  # that is what was measured first
        trial = bench.run("end_to_end", attempt, label="end to end")
        if trial.ok and (best is None or trial.rate > best.rate):
            best, best_changes = trial, attempt
    return best, best_changes


def enough_workers(bench: Bench, changes: Mapping[str, Any]) -> list[int | None]:
    """Worker counts worth a trial: none where making batches is nearly free, and the
    fewest whose rate alone is well above that of the steps. None: as configured."""
    needed = steps_rate(bench.results)
    chosen: list[int | None] = []
    tried: list[int | None] = []
    for workers in worker_counts():
        if bench.explored(EXPLORING_SHARE):
            break
        trial = bench.run(
            "loader",
            {**changes, "train.loader.num_workers": workers},
            label=f"loader alone, {workers} workers",
        )
        rate = trial.loader_samples_per_s or 0.0
        tried.append(workers)
        if workers == 0 and rate >= FREE_LOADER * needed:
            chosen.append(0)
            if not nvidia_gpu_count():
                break
        elif workers and rate >= LOADER_MARGIN * needed:
            chosen.append(workers)
            break
    return chosen or tried[-1:] or [None]


def worker_counts() -> list[int]:
    """0, 1, 2, 4, ... up to the cores of this machine."""
    cores = usable_cores()
    return [0, *(n for n in (1, 2, 4, 8, 16, 32) if n <= cores)]


def steps_rate(results: Iterable[TrialResult]) -> float:
    """Highest rate of steps alone."""
    rates = [t.rate for t in results if t.kind == "compute" and t.ok]
    return max(rates, default=0.0)


def free_batch(bench: Bench, tuned: Tuned) -> None:
    """Double the global batch while it gains; the best stands beside the chosen. The
    time for exploring is over here: each size is one trial, and the user has asked."""
    best, size = tuned.chosen, bench.settings.train.global_batch_size
    while 2 * size <= bench.train_rows:
        size *= 2
        freed = _freed(tuned.changes, tuned)
        attempt = {**tuned.changes, "train.global_batch_size": size, **freed}
        trial = bench.run("end_to_end", attempt, label=f"global batch {size}")
        if not trial.ok:
            tuned.free_note = f"{size} ended as {trial.status}: {trial.note}"
            return
        now, before = trial.rate, best.rate
        if now < BATCH_GROWTH * before:
            tuned.free_note = (
                f"{size} gave {now:,.0f} samples/s, "
                f"{best.global_batch_size} {before:,.0f}"
            )
            return
        best = tuned.free = trial
    tuned.free_note = f"the data has {bench.train_rows:,} train rows"


def _freed(changes: Changes, tuned: Tuned) -> Changes:
    """Budgets and graphs that were chosen for a smaller batch are chosen anew."""
    freed: Changes = {}
    if "train.cuda_graphs" in changes:
        freed["train.cuda_graphs"] = "auto"
    limit = tuned.memory.max_token_budget
    if "train.token_budget" in changes and limit:
        budget = max(int(changes["train.token_budget"]), limit)
        freed["train.token_budget"] = budget
    return freed
