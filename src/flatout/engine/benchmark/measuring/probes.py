"""Trials that measure only the loader, or record a profile."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from flatout.engine.batches.loader import StepLoader, run_steps
from flatout.engine.benchmark.measuring.driver import (
    ENDLESS,
    BlockRows,
    Driver,
    loaded_feed,
)
from flatout.engine.benchmark.measuring.windows import SPREAD_LIMIT_PCT, spread_of
from flatout.engine.benchmark.trials.trial_spec import TrialSpec
from flatout.engine.machine.runtime import Runtime, set_up
from flatout.engine.parameters import BenchmarkSettings
from flatout.engine.train.setup.assemble import assemble, build_model
from flatout.engine.train.setup.job import TrainJob
from flatout.engine.train.setup.resolved_config import resolve
from flatout.engine.train.setup.step_data import step_rows


def loader(spec: TrialSpec, job: TrainJob, folder: Path) -> dict[str, Any]:
    """Measure the throughput of the loader, copies to the device included."""
    runtime = set_up(job.settings.runtime)
    config = build_model(job).config
    resolved = resolve(job, runtime, config)
    data = step_rows(job, runtime, resolved, config)
    block = BlockRows.of(data, spec.measure.steps_per_trial)
    source = StepLoader(block, job.settings.train.loader, runtime, 0, ENDLESS)
    rates = _loader_rates(source, block, spec.measure)
    spread = spread_of(rates)
    notes = [f"windows differ by {spread:.0f} %"] if spread > SPREAD_LIMIT_PCT else []
    return {
        "loader_samples_per_s": median(rates),
        "samples_per_s_spread_pct": spread,
        "num_workers": source.num_workers,
        "strategy": resolved.strategy,
        "token_budget": resolved.token_budget,
        "attention": resolved.attention,
        "precision": runtime.precision,
        "device": runtime.device_name,
        "note": "; ".join(notes),
    }


def _loader_rates(
    source: StepLoader, block: BlockRows, measure: BenchmarkSettings
) -> list[float]:
    """Return the loader's samples/s in each window."""
    batches, runtime = iter(source), source.runtime
    runs = source.num_workers * source.settings.prefetch_factor
    ahead = runs * run_steps(block)
    for _ in range(measure.warmup_steps + ahead):  # skip the prefetched batches
        next(batches)
    rates = []
    for _ in range(measure.repeats):
        runtime.synchronize()
        begin, samples = time.perf_counter(), 0
        while time.perf_counter() - begin < measure.min_window_s or not samples:
            for _ in range(block.period):
                samples += next(batches).num_samples
        runtime.synchronize()
        rates.append(samples / (time.perf_counter() - begin))
    return rates


PROFILED_STEPS = 5
OPERATORS = 40
HISTORY = 200_000
"""Maximum number of allocations in a memory snapshot."""

TRACE_VIEWER = "https://ui.perfetto.dev (or chrome://tracing): open the file there"
MEMORY_VIEWER = "https://docs.pytorch.org/memory_viz: drop the file there"


def profile(spec: TrialSpec, job: TrainJob, folder: Path) -> dict[str, Any]:
    """Profile a few steps and write trace.json.gz, operators.txt and, on a GPU,
    memory.pickle to `folder`."""
    runtime = set_up(job.settings.runtime)
    trainer = assemble(job, runtime)
    trainer.model.train()
    feed, driver = loaded_feed(trainer, spec.measure.steps_per_trial), Driver(trainer)
    for _ in range(spec.measure.warmup_steps + 1):
        feed.step(driver)
    driver.synchronize()
    if runtime.is_cuda:
        torch.cuda.memory._record_memory_history(max_entries=HISTORY)
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if runtime.is_cuda else []
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(PROFILED_STEPS):
            feed.step(driver)
        driver.synchronize()
    return {"files": _write(profiler, runtime, folder), "steps": PROFILED_STEPS}


def _write(profiler: Any, runtime: Runtime, folder: Path) -> dict[str, dict[str, str]]:
    """Write the profile's files. Return the path and viewer of each file by name."""
    trace, table = folder / "trace.json.gz", folder / "operators.txt"
    profiler.export_chrome_trace(str(trace))
    by = "self_device_time_total" if runtime.is_cuda else "self_cpu_time_total"
    averages = profiler.key_averages()
    table.write_text(averages.table(sort_by=by, row_limit=OPERATORS))
    files = {
        "trace": {"file": str(trace), "view": TRACE_VIEWER},
        "operators": {"file": str(table), "view": "a text file"},
    }
    if runtime.is_cuda:
        snapshot = folder / "memory.pickle"
        memory: Any = torch.cuda.memory
        memory._dump_snapshot(str(snapshot))
        torch.cuda.memory._record_memory_history(enabled=None)
        files["memory"] = {"file": str(snapshot), "view": MEMORY_VIEWER}
    return files
