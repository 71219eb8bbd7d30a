"""The `tune` mode: find the best settings with few trials.

The search first measures compute alone, for different batching strategies, token
budgets and step options. It then measures the loader alone, for different numbers of
workers. Finally it measures the best settings end to end, alternating with the
configured settings. The chosen settings then run in a few short extra processes, which
show how much their throughput varies. The user's global batch size is never changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flatout.engine.benchmark.runner import Bench
from flatout.engine.benchmark.trials.trial_spec import Changes, TrialResult
from flatout.engine.machine.environment import nvidia_gpu_count, usable_cores

CONFIGURED = "as configured"
"""Label of the end-to-end trial with the original settings."""
GAIN = 1.02
"""A change must speed up training by this factor. Smaller gains may be noise."""
LOADER_MARGIN = 1.5
"""The loader, measured alone, must be at least this many times as fast as the steps."""
FREE_LOADER = 20.0
"""If the loader without workers is this many times as fast as the steps, no workers are
needed, because building a batch takes less than 5 % of a step's time."""
EXPLORING_SHARE = 0.6
"""Fraction of the time limit spent on exploration. The rest is for confirmation."""
AGAIN_ON_CPU, AGAIN_ON_GPU = 3, 1
"""Number of extra processes that show how much the throughput of the chosen settings
varies. There are fewer on a GPU, where each takes half a minute to start."""


@dataclass
class Tuned:
    """The result of `tune`. The two trials are also in the results of the benchmark."""

    configured: TrialResult
    """The end-to-end trial with the original settings."""
    chosen: TrialResult
    changes: Changes
    rate: float
    """Throughput of the chosen trial in samples/s (see `_end_to_end`)."""


def tune(bench: Bench) -> Tuned | None:
    """Return the best settings found, or None if the configured settings cannot run."""
    configured = bench.run("end_to_end", label=CONFIGURED)
    changes = _runnable(bench, configured)
    if changes is None:
        return None
    changes = explore_steps(bench, changes)
    tuned = cross(bench, changes, configured)
    if tuned is None:
        return None
    for _ in range(AGAIN_ON_GPU if nvidia_gpu_count() else AGAIN_ON_CPU):
        options = {"again": len(bench.results)}
        bench.run("again", tuned.changes, label="once more", options=options)
    if bench.processes > 1:
        bench.run("end_to_end", changes, world_size=1, label="one device")
    return tuned


def _runnable(bench: Bench, configured: TrialResult) -> Changes | None:
    """Return the changes needed to run the configured settings, or None if they cannot
    run. If the device runs out of memory, smaller token budgets are tried."""
    if configured.status != "oom":
        return {} if configured.ok else None
    for rows in (16, 4, 1):
        changes = {"train.token_budget": round_budget(rows * bench.rows.facts.longest)}
        label = f"compute alone, token_budget of {rows} longest rows"
        if bench.run("compute", changes, label=label).ok:
            return changes
    return None


def explore_steps(bench: Bench, changes: Changes) -> Changes:
    """Measure compute alone, varying one setting at a time. Return `changes` together
    with each change that makes the steps faster."""
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
    """Yield each step setting with the values to try in order. Once a value brings no
    gain, the caller skips the remaining values of that setting."""
    configured = first.strategy
    for strategy in () if bench.rows.one_shape else bench.options.strategies:
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
    # With CUDA graphs, all gradients are always all-reduced together.
    if reduces and distributed.bucket_mib != "all" and first.cuda_graphs is not True:
        yield "train.distributed.bucket_mib", ["all"]
    if nvidia_gpu_count():
        yield "train.compile", [not first.compile]
        yield "train.cuda_graphs", [not first.cuda_graphs]


def gains(trial: TrialResult, best: TrialResult) -> bool:
    if not trial.ok or not trial.samples_per_s:
        return False
    return bool(trial.samples_per_s >= GAIN * (best.samples_per_s or 0.0))


def cross(bench: Bench, changes: Changes, configured: TrialResult) -> Tuned | None:
    """Measure the step options `changes` end to end, with enough loader workers. Return
    the fastest result, which may be `configured`, or None if all trials fail."""
    best = Tuned(configured, configured, {}, configured.rate) if configured.ok else None
    for workers in enough_workers(bench, changes):
        if workers in (None, configured.num_workers):
            attempt = changes
        else:
            attempt = {**changes, "train.loader.num_workers": workers}
        if not attempt and best is not None:
            continue  # the configured settings have already been measured
        trial, rate = _end_to_end(bench, configured, "end to end", attempt)
        if trial.ok and (best is None or rate > best.rate):
            best = Tuned(configured, trial, attempt, rate)
    return best


def _end_to_end(
    bench: Bench, configured: TrialResult, label: str, changes: Changes
) -> tuple[TrialResult, float]:
    """Return an end-to-end trial and its throughput in samples/s. On one device, the
    trial alternates with the configured settings, and the throughput is the measured
    ratio times the throughput of `configured`, because the host's speed drifts."""
    if bench.processes > 1 or not configured.ok:
        trial = bench.run("end_to_end", changes, label=label)
        return trial, trial.rate
    number = len(bench.results) + 1
    trial, ratio = bench.compare(bench.settings, number, label, changes, {})
    return trial, (ratio or 0.0) * configured.rate


def enough_workers(bench: Bench, changes: Mapping[str, Any]) -> list[int | None]:
    """Return the numbers of loader workers that are worth an end-to-end trial: 0 if
    building batches is nearly free, and the smallest number with which the loader is
    LOADER_MARGIN times as fast as the steps. None stands for the configured number."""
    steps = [t.rate for t in bench.results if t.kind == "compute" and t.ok]
    needed = max(steps, default=0.0)
    chosen: list[int | None] = []
    tried: list[int | None] = []
    counts = [n for n in (0, 1, 2, 4, 8, 16, 32) if n <= usable_cores()]
    for workers in counts:
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


def falling_budgets(bench: Bench, first: TrialResult) -> list[int]:
    """Return token budgets of 1/2, 1/4, ... of a global batch's tokens (or of the
    resolved budget, if it is smaller), down to the length of the longest row."""
    facts = bench.rows.facts
    mean = bench.settings.train.global_batch_size * facts.mean_length
    # With a margin of 20 %, most batches are split into as many parts as an average
    # batch.
    largest = min(1.2 * mean, float(first.token_budget))
    halves = [largest / 2**power for power in range(1, 8)]
    return [round_budget(half) for half in halves if half >= facts.longest]


def rising_budgets(bench: Bench, first: TrialResult) -> list[int]:
    """Return 2, 4, ... times the resolved token budget, up to the budget with which a
    whole global batch fits into one micro-batch."""
    resolved, facts = int(first.token_budget), bench.rows.facts
    longest_batch = bench.settings.train.global_batch_size * facts.longest
    budgets = [resolved * 2**power for power in range(1, 6)]
    needed = bench.settings.train.global_batch_size * facts.mean_length
    return [b for b in budgets if needed > resolved and b <= 2 * longest_batch]


def round_budget(tokens: float) -> int:
    """Round up to a multiple of 64 (the tile size of the kernels), or of 8 if small."""
    multiple = 64 if tokens >= 1024 else 8
    return -(-int(tokens) // multiple) * multiple
