"""Rates of real training steps, and where their time goes.

Rates come from windows without phase timing, through the same recorder, loader and
step that training uses; phases are timed afterwards, on steps that rank nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from flatout.engine.assemble import Trainer, assemble
from flatout.engine.bench.blocks import ENDLESS, BlockRows
from flatout.engine.bench.driver import Driver, Feed
from flatout.engine.bench.phases import launch_ms, phase_ms
from flatout.engine.bench.trial_spec import Measure, TrialSpec
from flatout.engine.bench.utilisation import GpuSampler
from flatout.engine.collation import StepBatch
from flatout.engine.job import TrainJob
from flatout.engine.jobs.distributed import Team
from flatout.engine.loader import StepLoader
from flatout.engine.runtime import Runtime, memory, set_up
from flatout.engine.summary import efficiency
from flatout.engine.timing import Rates, Window, compile_clock, steady

PHASE_STEPS = 8
PHASE_SECONDS = 2.0
SPREAD_LIMIT_PCT = 5.0
"""Windows further apart than this are said to be so."""


def end_to_end(spec: TrialSpec, job: TrainJob, folder: Path) -> dict[str, Any]:
    """Loader, copies, steps and log points, as in training."""

    def feed(trainer: Trainer, steps: int) -> Feed:
        block = BlockRows.of(trainer.data, steps)
        loader_settings = job.settings.train.loader
        loader = StepLoader(block, loader_settings, trainer.runtime, 0, ENDLESS)
        return Feed(loader, iter(loader), block.period)

    return _measured(spec, job, folder, feed)


def compute(spec: TrialSpec, job: TrainJob, folder: Path) -> dict[str, Any]:
    """Steps alone: the block's batches lie on the device before the clock starts."""

    def feed(trainer: Trainer, steps: int) -> Feed:
        block = BlockRows.of(trainer.data, steps)
        device = trainer.runtime.device
        batches = [block[index].to(device) for index in range(block.period)]
        return Feed(None, _cycle(batches), block.period)

    return _measured(spec, job, folder, feed)


def _cycle(batches: list[StepBatch]) -> Iterator[StepBatch]:
    while True:
        yield from batches


def _measured(
    spec: TrialSpec, job: TrainJob, folder: Path, feed: Any
) -> dict[str, Any]:
    runtime = set_up(job.settings.runtime)
    compile_clock.listen()
    team = _join(job, runtime)
    trainer = assemble(job, runtime, team)
    trainer.model.train()
    driver = Driver(trainer)
    steady_feed = feed(trainer, spec.measure.steps)
    first_step_s, step_s = _warm_up(driver, steady_feed, spec.measure)
    steps = _block_steps(spec.measure, step_s)
    if steps < steady_feed.period:  # other workers need seconds to start
        del steady_feed  # its workers and batches go before the next ones come
        steady_feed = feed(trainer, steps)
    with GpuSampler(runtime) as sampler:
        windows = _windows(driver, steady_feed, spec.measure, step_s)
    few = max(2, min(PHASE_STEPS, int(PHASE_SECONDS / step_s)))
    host_ms = launch_ms(trainer, steady_feed.batches, few)
    phases = phase_ms(trainer, steady_feed.batches, few)
    if team:
        team.leave()
    return {
        **_rates(windows),
        **phases,
        "host_ms": host_ms,
        **_memory(runtime),
        **_settled(trainer, steady_feed),
        "tflops_per_s": efficiency(trainer, windows)["tflops_per_s"],
        "gpu_util_pct": sampler.mean_pct,
        "first_step_s": first_step_s,
        "compile_s": compile_clock.seconds,
        "recompiles": compile_clock.recompiles,
        "note": _note(trainer, windows),
    }


def _join(job: TrainJob, runtime: Runtime) -> Team | None:
    """The other ranks, where this process is one of several."""
    if runtime.ranks.world_size == 1:
        return None
    return Team.join(job.settings.train.distributed, runtime)


def _agreed(value: float, runtime: Runtime) -> float:
    """The highest of all ranks: they must take the same number of steps."""
    if runtime.ranks.world_size == 1:
        return value
    shared = torch.tensor(value, dtype=torch.float64, device=runtime.device)
    torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
    return float(shared)


def _warm_up(driver: Driver, feed: Feed, measure: Measure) -> tuple[float, float]:
    """Seconds of the first, cold step, and of a warm one."""
    begin = time.perf_counter()
    feed.step(driver)
    driver.synchronize()
    cold_s = time.perf_counter() - begin
    for _ in range(measure.warmup_steps):
        feed.step(driver)
    driver.synchronize()
    begin = time.perf_counter()
    for _ in range(2):
        feed.step(driver)
    driver.synchronize()
    step_s = (time.perf_counter() - begin) / 2
    return cold_s, _agreed(step_s, driver.trainer.runtime)


def _block_steps(measure: Measure, step_s: float) -> int:
    """Steps of a block that fit a window, at least two."""
    return max(2, min(measure.steps, int(measure.max_window_s / step_s)))


def _windows(
    driver: Driver, feed: Feed, measure: Measure, step_s: float
) -> list[Window]:
    """Windows over whole blocks, fastest first. Where compilations, graph captures or
    other processes spoil some, up to twice as many and one more are taken."""
    feed.step(driver)  # starts the loader's workers
    windows: list[Window] = []
    for _ in range(2 * measure.repeats + 1):
        passes = max(1, round(measure.min_window_s / (feed.period * step_s)))
        driver.synchronize()
        driver.clock.begin()
        for _ in range(passes * feed.period):
            feed.step(driver)
        driver.synchronize()
        compiles = _agreed(driver.clock.compiles, driver.trainer.runtime)
        windows.append(driver.clock.close(int(compiles)))
        # Replayed graphs are quicker than the warm-up was.
        step_s = _agreed(min(step_s, _step_s(windows[-1])), driver.trainer.runtime)
        chosen = fastest_windows(windows, measure.repeats)
        enough = len(chosen) == measure.repeats
        unsteady = not enough or spread_pct(chosen) > SPREAD_LIMIT_PCT
        if not _agreed(float(unsteady), driver.trainer.runtime):
            break
    return chosen


def fastest_windows(windows: list[Window], count: int) -> list[Window]:
    """The fastest `count` among clean windows: all go over the same rows, so what is
    slower was disturbed, by a compilation or by another process."""
    return sorted(steady(windows), key=_step_s)[:count]


def _step_s(window: Window) -> float:
    return window.wall_s / window.steps


def spread_pct(windows: list[Window]) -> float:
    """(highest - lowest) / median of the rates."""
    rates = [window.samples / window.wall_s for window in windows]
    return 100 * (max(rates) - min(rates)) / median(rates)


def _rates(windows: list[Window]) -> dict[str, Any]:
    """Of the window with the median rate (they come ordered); p90 over all steps."""
    middle = windows[len(windows) // 2]
    figures = Rates.over([middle])
    return {
        "samples_per_s": figures.samples_per_s,
        "samples_per_s_spread_pct": spread_pct(windows) if len(windows) > 1 else None,
        "window_samples_per_s": [w.samples / w.wall_s for w in windows],
        "tokens_per_s": figures.tokens_per_s,
        "padding_pct": figures.padding_pct,
        "io_ms": 1000 * middle.wait_s / middle.steps,
        "total_ms": 1000 * middle.wall_s / middle.steps,
        "total_ms_p90": Rates.over(windows).step_ms_p90,
    }


def _memory(runtime: Runtime) -> dict[str, Any]:
    peaks = memory(runtime)
    return {
        "peak_memory_gib": peaks["peak_allocated_gib"],
        "reserved_memory_gib": peaks["peak_reserved_gib"],
        "allocation_retries": peaks["allocation_retries"],
    }


def _settled(trainer: Trainer, feed: Feed) -> dict[str, Any]:
    """What every `auto` came to."""
    choices = trainer.choices
    return {
        "strategy": choices.strategy,
        "attention": choices.attention,
        "token_budget": choices.token_budget,
        "compile": choices.compile,
        "cuda_graphs": choices.cuda_graphs,
        "precision": trainer.runtime.precision,
        "num_workers": feed.loader.num_workers if feed.loader else 0,
        "device": trainer.runtime.device_name,
        "block_steps": feed.period,
    }


def _note(trainer: Trainer, windows: list[Window]) -> str:
    notes = list(trainer.choices.notes)
    spread = spread_pct(windows)
    if spread > SPREAD_LIMIT_PCT:
        notes.append(f"windows differ by {spread:.0f} %")
    if not all(window.clean for window in windows):
        notes.append("compilations fell into every window")
    if trainer.choices.cuda_graphs:
        notes.append("phases without CUDA graphs")
    return "; ".join(notes)
