"""Trials beside the steps: the loader alone, the memory, the device's peak."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatout.engine.assemble import build_model
from flatout.engine.batching import Ints
from flatout.engine.bench.blocks import ENDLESS, BlockRows
from flatout.engine.bench.trial_spec import Measure, TrialSpec
from flatout.engine.bench.windows import SPREAD_LIMIT_PCT
from flatout.engine.choices import choose
from flatout.engine.collation import StepRows
from flatout.engine.container import total_memory_bytes
from flatout.engine.job import TrainJob
from flatout.engine.loader import StepLoader, resolve_workers
from flatout.engine.runtime import DTYPES, Runtime, set_up
from flatout.engine.step_data import step_rows

SLOW_SHOWN = 5
PEAK_SECONDS = 1.0


def loader(spec: TrialSpec, job: TrainJob, folder: Path) -> dict[str, Any]:
    """Batches a second without any step, copies to the device included; and which
    stages of making a batch are slow, by timers of this process."""
    runtime = set_up(job.settings.runtime)
    config = build_model(job, "sdpa").config
    choices = choose(job, runtime, config)
    data = step_rows(job, runtime, choices, config)
    workers = resolve_workers(job.settings.train.loader, runtime)
    rates = _loader_rates(job, runtime, data, spec.measure)
    spread = 100 * (max(rates) - min(rates)) / float(np.median(rates))
    notes = [f"windows differ by {spread:.0f} %"] if spread > SPREAD_LIMIT_PCT else []
    return {
        "loader_samples_per_s": float(np.median(rates)),
        "samples_per_s_spread_pct": spread,
        "num_workers": workers,
        "strategy": choices.strategy,
        "token_budget": choices.token_budget,
        "attention": choices.attention,
        "precision": runtime.precision,
        "device": runtime.device_name,
        "stages": stage_times(data, spec.measure),
        "note": "; ".join(notes),
    }


def _loader_rates(
    job: TrainJob, runtime: Runtime, data: StepRows, measure: Measure
) -> list[float]:
    """Samples a second of each window."""
    block = BlockRows.of(data, measure.steps)
    source = StepLoader(block, job.settings.train.loader, runtime, 0, ENDLESS)
    batches = iter(source)
    ahead = source.num_workers * job.settings.train.loader.prefetch_factor
    for _ in range(measure.warmup_steps + ahead):  # what was ready beforehand
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


@dataclass
class _Timed:
    """Passes calls of one method on, and notes how long each took."""

    inner: Any
    method: str
    ms: list[float] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return self._timed(found) if name == self.method else found

    def _timed(self, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            begin = time.perf_counter()
            result = function(*arguments)
            self.ms.append(1000 * (time.perf_counter() - begin))
            return result

        return call


def stage_times(data: StepRows, measure: Measure) -> dict[str, Any]:
    """Milliseconds of the stages of a batch, and the batches that took longer than
    `slow_rows_ms` with their rows (guide D's slow transforms)."""
    stages: dict[str, Any] = {
        "choose_rows": _Timed(data.batches, "rows"),
        "plan": _Timed(data.planner, "plan"),
        "collate": _Timed(data.collator, "collate"),
    }
    timed = replace(
        data,
        batches=stages["choose_rows"],
        planner=stages["plan"],
        collator=stages["collate"],
    )
    block = BlockRows.of(data, measure.steps)
    slow, total_ms = [], []
    for step in range(block.first, block.first + block.period):
        begin = time.perf_counter()
        batch = timed[step]
        took_ms = 1000 * (time.perf_counter() - begin)
        total_ms.append(took_ms)
        if took_ms > measure.slow_rows_ms:
            slow.append(_slow_batch(data, step, took_ms, batch.row_ids))
    means = {name: sum(t.ms) / block.period for name, t in stages.items()}
    return {
        "batch_ms": float(np.mean(total_ms)),
        **{f"{name}_ms": mean for name, mean in means.items()},
        "slow_ms": measure.slow_rows_ms,
        "slow": sorted(slow, key=lambda entry: -entry["ms"])[:SLOW_SHOWN],
        "slow_count": len(slow),
    }


def _slow_batch(data: StepRows, step: int, ms: float, row_ids: Ints) -> dict[str, Any]:
    lengths = data.rows.lengths(row_ids)
    longest = row_ids[np.argsort(-lengths)[:3]].tolist()
    return {
        "step": step,
        "ms": ms,
        "longest_rows": longest,
        "tokens": int(lengths.sum()),
    }


def device(spec: TrialSpec, job: TrainJob, folder: Path) -> dict[str, Any]:
    """What the device can do: matrix products in the run's precision, memory."""
    runtime = set_up(job.settings.runtime)
    return {
        "device": runtime.device_name,
        "threads": runtime.threads,
        "precision": runtime.precision,
        "peak_tflops_measured": matmul_tflops(runtime),
        "memory_gib": _memory_bytes(runtime) / 2**30,
    }


def matmul_tflops(runtime: Runtime) -> float:
    """Best of square products, TFLOP/s."""
    size = 8192 if runtime.is_cuda else 1536
    dtype = DTYPES[runtime.precision]
    a = torch.randn(size, size, device=runtime.device, dtype=dtype)
    b = torch.randn(size, size, device=runtime.device, dtype=dtype)
    best_s, begin = float("inf"), time.perf_counter()
    calls = 10 if runtime.is_cuda else 1
    while time.perf_counter() - begin < PEAK_SECONDS:
        runtime.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            torch.mm(a, b)
        runtime.synchronize()
        best_s = min(best_s, (time.perf_counter() - start) / calls)
    return 2 * size**3 / best_s / 1e12


def _memory_bytes(runtime: Runtime) -> int:
    if runtime.is_cuda:
        return int(torch.cuda.get_device_properties(runtime.device).total_memory)
    return total_memory_bytes()
