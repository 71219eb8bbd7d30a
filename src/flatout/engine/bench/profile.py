"""Where the time and the memory of a few steps go, operator by operator (guide D)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from flatout.engine.assemble import assemble
from flatout.engine.bench.blocks import ENDLESS, BlockRows
from flatout.engine.bench.driver import Driver, Feed
from flatout.engine.bench.trial_spec import TrialSpec
from flatout.engine.job import TrainJob
from flatout.engine.loader import StepLoader
from flatout.engine.runtime import Runtime, set_up

PROFILED_STEPS = 5
OPERATORS = 40
HISTORY = 200_000
"""Allocations that a memory snapshot remembers."""

TRACE_VIEWER = "https://ui.perfetto.dev (or chrome://tracing): open the file there"
MEMORY_VIEWER = "https://docs.pytorch.org/memory_viz: drop the file there"


def profile(spec: TrialSpec, job: TrainJob, folder: Path) -> dict[str, Any]:
    """trace.json.gz, operators.txt and, on a GPU, memory.pickle in `folder`."""
    runtime = set_up(job.settings.runtime)
    trainer = assemble(job, runtime)
    trainer.model.train()
    block = BlockRows.of(trainer.data, spec.measure.steps)
    loader = StepLoader(block, job.settings.train.loader, runtime, 0, ENDLESS)
    feed, driver = Feed(loader, iter(loader), block.period), Driver(trainer)
    for _ in range(spec.measure.warmup_steps + 1):
        feed.step(driver)
    driver.synchronize()
    if runtime.is_cuda:
        torch.cuda.memory._record_memory_history(max_entries=HISTORY)
    with torch.profiler.profile(activities=_activities(runtime)) as profiler:
        for _ in range(PROFILED_STEPS):
            feed.step(driver)
        driver.synchronize()
    return {"files": _write(profiler, runtime, folder), "steps": PROFILED_STEPS}


def _activities(runtime: Runtime) -> list[ProfilerActivity]:
    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    return both if runtime.is_cuda else both[:1]


def _write(profiler: Any, runtime: Runtime, folder: Path) -> dict[str, dict[str, str]]:
    """Files by name, each with where to look at it."""
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
