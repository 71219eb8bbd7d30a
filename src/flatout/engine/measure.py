"""Rates of real training steps, and where their time goes.

Rates come from windows without phase timing, through the same recorder, loader and
step that training uses; phases are timed afterwards, on steps that rank nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from flatout.engine.assemble import Trainer, TrainJob, assemble
from flatout.engine.batching import GlobalBatches
from flatout.engine.collation import StepBatch, StepRows
from flatout.engine.loader import StepLoader
from flatout.engine.optim import learning_rate, set_learning_rate
from flatout.engine.phases import phase_ms
from flatout.engine.recorder import Recorder
from flatout.engine.runtime import Runtime, set_up
from flatout.engine.summary import efficiency, memory
from flatout.engine.timing import Rates, Window, WindowClock, compile_clock
from flatout.engine.tokens import TokenRows
from flatout.engine.trials import Measure, TrialSpec
from flatout.engine.utilisation import GpuSampler

CANDIDATE_BLOCKS = 64
PHASE_STEPS = 8
SPREAD_LIMIT_PCT = 5.0
"""Windows further apart than this are said to be so."""
ENDLESS = 2**40


@dataclass(frozen=True)
class BlockRows(StepRows):
    """The same `period` steps over and over, from `first` on: every window measures
    the same rows. Steps are numbered from 0 without a gap."""

    first: int = 0
    period: int = 1

    def __getitem__(self, index: int) -> StepBatch:
        batch = super().__getitem__(self.first + index % self.period)
        return replace(batch, step=index)

    @classmethod
    def of(cls, data: StepRows, steps: int) -> BlockRows:
        first, period = representative_block(data.rows, data.batches, steps)
        parts = (data.rows, data.batches, data.planner, data.collator, data.rank)
        return cls(*parts, first=first, period=period)


def representative_block(
    rows: TokenRows, batches: GlobalBatches, steps: int
) -> tuple[int, int]:
    """First step and number of steps of the first epoch whose mean length is nearest
    to that of all rows, so that few steps speak for an epoch."""
    whole = max(1, len(rows) // batches.batch_size)
    steps = min(steps, whole)
    starts = np.unique(np.linspace(0, whole - steps, CANDIDATE_BLOCKS).astype(int))
    mean = float(rows.all_lengths.mean())

    def distance(start: int) -> float:
        block = [batches.rows(step) for step in range(start, start + steps)]
        return abs(float(rows.lengths(np.concatenate(block)).mean()) - mean)

    return min(starts.tolist(), key=distance), steps


class Driver:
    """Takes training steps one by one, as the training loop does."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.recorder = Recorder(trainer, time.perf_counter())
        self.clock = WindowClock(trainer.runtime.device)
        self.recorder.start(0)
        self._done = 0

    def step(self, batch: StepBatch, wait_s: float) -> None:
        trainer = self.trainer
        train, total = trainer.job.settings.train, trainer.total_steps
        batch = replace(batch, step=self._done)
        rate = learning_rate(train, self._done % total, total)
        set_learning_rate(trainer.optimizer, rate)
        self.recorder.step_begins()
        self.clock.step_begins()
        trainer.stepper(batch)
        self.clock.step_ends(batch, wait_s)
        self.recorder.step_ends(batch, wait_s, rate)
        self._done += 1
        if self.recorder.log_due(self._done):
            self.recorder.log(batch, rate)

    def synchronize(self) -> None:
        self.trainer.runtime.synchronize()


@dataclass
class Feed:
    """Batches of a block without end, and how long the last one kept the step."""

    loader: StepLoader | None
    batches: Iterator[StepBatch]
    period: int

    def step(self, driver: Driver) -> None:
        batch = next(self.batches)
        driver.step(batch, self.loader.wait_s if self.loader else 0.0)


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
    trainer = assemble(job, runtime)
    trainer.model.train()
    driver = Driver(trainer)
    first_step_s, step_s = _warm_up(
        driver, feed(trainer, spec.measure.steps), spec.measure
    )
    steps = _block_steps(spec.measure, step_s)
    steady_feed = feed(trainer, steps)
    with GpuSampler(runtime) as sampler:
        windows = _windows(driver, steady_feed, spec.measure, step_s)
    phases = phase_ms(
        trainer, steady_feed.batches, min(PHASE_STEPS, steady_feed.period)
    )
    return {
        **_rates(windows),
        **phases,
        **_memory(runtime),
        **_settled(trainer, steady_feed),
        "tflops_per_s": efficiency(trainer, windows)["tflops_per_s"],
        "gpu_util_pct": sampler.mean_pct,
        "first_step_s": first_step_s,
        "compile_s": compile_clock.seconds,
        "recompiles": max(0, compile_clock.count - 1),
        "note": _note(trainer, windows),
    }


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
    return cold_s, (time.perf_counter() - begin) / 2


def _block_steps(measure: Measure, step_s: float) -> int:
    """Steps of a block that fit a window, at least two."""
    return max(2, min(measure.steps, int(measure.max_window_s / step_s)))


def _windows(
    driver: Driver, feed: Feed, measure: Measure, step_s: float
) -> list[Window]:
    """Windows over whole blocks. Compilations and graph captures spoil a window: more
    are taken then."""
    feed.step(driver)  # starts the loader's workers
    passes = max(1, round(measure.min_window_s / (feed.period * step_s)))
    windows: list[Window] = []
    for _ in range(2 * measure.repeats + 1):
        driver.synchronize()
        driver.clock.begin()
        for _ in range(passes * feed.period):
            feed.step(driver)
        driver.synchronize()
        windows.append(driver.clock.close())
        if sum(window.clean for window in windows) >= measure.repeats:
            break
    clean = [window for window in windows if window.clean]
    return clean or windows


def _rates(windows: list[Window]) -> dict[str, Any]:
    """Of the window with the median rate; p90 over all steps."""
    rates = [window.samples / window.wall_s for window in windows]
    middle = windows[int(np.argsort(rates)[len(rates) // 2])]
    figures = Rates.over([middle])
    return {
        "samples_per_s": median(rates) if len(rates) % 2 else figures.samples_per_s,
        "samples_per_s_spread_pct": 100 * (max(rates) - min(rates)) / median(rates),
        "window_samples_per_s": rates,
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
    spread = _rates(windows)["samples_per_s_spread_pct"]
    if spread > SPREAD_LIMIT_PCT:
        notes.append(f"windows differ by {spread:.0f} %")
    if not all(window.clean for window in windows):
        notes.append("compilations fell into every window")
    if trainer.choices.cuda_graphs:
        notes.append("phases without CUDA graphs")
    return "; ".join(notes)
