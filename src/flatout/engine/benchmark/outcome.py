"""Summarise a benchmark as JSON values for benchmark_summary.json."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict
from typing import Any

from flatout.engine.benchmark.recommend import (
    provenance,
    time_to_train,
    tuned_parameters,
    versions,
)
from flatout.engine.benchmark.runner import Bench
from flatout.engine.benchmark.search import ADVISES, Search
from flatout.engine.benchmark.trials.trial_spec import TrialResult
from flatout.engine.benchmark.tune import GAIN
from flatout.engine.benchmark.verdict import judge
from flatout.engine.machine.environment import nvidia_gpu_count
from flatout.engine.models.flops import peak_tflops


class BenchmarkError(RuntimeError):
    """Raised if a benchmark has no successful measurement."""

    exit_code = 1


def summarise(search: Search) -> dict[str, Any]:
    """Return the content of benchmark_summary.json: all results of the benchmark except
    the tables of trials and rungs."""
    bench, recommended = search.bench, search.recommended
    return {
        "mode": bench.options.mode,
        **_conditions(bench),
        "trials": dict(Counter(trial.status for trial in bench.results)),
        "reused_trials": bench.reused,
        "skipped": search.skipped,
        "elapsed_s": bench.elapsed_s,
        "picks": {name: t and t.as_row() for name, t in search.picks.items()},
        "verdict": _verdict(search, recommended),
        "time_to_train": time_to_train(
            len(bench.rows),
            bench.settings.train.epochs,
            _reference(search, recommended),
            recommended,
        ),
        "failed": None if recommended else _first_fault(search),
        "tuned": _tuned(search, recommended),
        "profile": bench.profile,
    }


def _conditions(bench: Bench) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "device": bench.device,
        "devices": max(1, nvidia_gpu_count()),
        "memory_gib": bench.memory_gib,
        "memory_headroom": bench.options.memory_headroom,
        "peak_tflops": peak_tflops(bench.device),
        "versions": versions(),
        "token_key": bench.files.data_key,
        "rows": len(bench.rows),
        "mean_tokens": bench.rows.facts.mean_length,
        "longest_tokens": bench.rows.facts.longest,
        "global_batch_size": bench.settings.train.global_batch_size,
        "max_steps": bench.settings.train.max_steps,
    }


def _first_fault(search: Search) -> dict[str, Any] | None:
    """Return the first failed end-to-end trial, to explain a missing recommendation."""
    if search.bench.options.mode not in ADVISES:
        return None
    tried = [t for t in search.bench.results if t.kind == "end_to_end"]
    return next((trial.as_row() for trial in tried if not trial.ok), None)


def _verdict(search: Search, trial: TrialResult | None) -> dict[str, Any] | None:
    """Return the verdict on the recommended trial, falling back to the last trial of
    the ladder, then to the fastest trial on the largest number of devices."""
    bench = search.bench
    measured = [t for t in bench.results if t.kind == "end_to_end"]
    tops = {step.trial_id for step in search.ladder[-1:]}
    top = next((t for t in measured if t.trial_id in tops), None)
    chosen = (
        trial
        or top
        or max(measured, key=lambda t: (t.ok, t.world_size, t.rate), default=None)
    )
    if chosen is None:
        return None
    single = next((t for t in measured if t.world_size == 1), None)
    if not nvidia_gpu_count():
        single = None  # ranks on one CPU share its cores, so they cannot scale
    tried = [t for t in bench.results if t is not chosen]
    found = judge(chosen, memory_gib=bench.memory_gib, single=single, tried=tried)
    return {"trial_id": chosen.trial_id, **asdict(found)}


def _tuned(search: Search, trial: TrialResult | None) -> dict[str, Any] | None:
    """Return the tuned parameters and their provenance, or None if `trial` is None.
    `gained` is False if the trial is 1 to `GAIN` times as fast as the configured
    settings. A slower trial is recommended only if the configured settings leave too
    little memory free."""
    if trial is None:
        return None
    bench = search.bench
    like = [one.rate for one in bench.results if _is_like(one, trial, bench)]
    reference = _reference(search, trial)
    before = reference.samples_per_s if reference else None
    gain = search.rate_of(trial) / before if before else None
    if reference is trial:
        gain = 1.0
    source = provenance(
        bench.settings,
        bench.device,
        trial.world_size,
        bench.files.data_key,
        like or [trial.rate],
        gain,
    )
    return {
        "parameters": tuned_parameters(bench.settings, trial),
        "provenance": source,
        "gained": gain is None or not 1 <= gain < GAIN,
        "changes_optimisation": (
            trial.global_batch_size != bench.settings.train.global_batch_size
        ),
    }


def _reference(search: Search, trial: TrialResult | None) -> TrialResult | None:
    """Return the trial that measured the configured settings: `trial` itself, if it has
    these settings and they were measured more than once."""
    configured = search.configured
    if configured is None or trial is None:
        return configured
    return trial if _is_like(configured, trial, search.bench) else configured


def _is_like(trial: TrialResult, wanted: TrialResult, bench: Bench) -> bool:
    """Return whether `trial` measured the throughput of the same parameters on the same
    number of devices as `wanted`, and succeeded."""
    one, other = (tuned_parameters(bench.settings, t) for t in (trial, wanted))
    return (
        trial.ok
        and trial.kind in ("end_to_end", "again")
        and trial.world_size == wanted.world_size
        and one == other
    )
