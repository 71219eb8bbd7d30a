"""Measure throughput in windows that consist of whole blocks of steps.

The rules are the same for every trial in every mode. The rows of a window are typical
of the split. At least `repeats` windows are measured, and `enough` decides when to
stop. Windows in which something was compiled are discarded. The trial's throughput is
that of the median window. Only repeated trials (kind `again`) measure fewer windows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from flatout.engine.benchmark.measuring.driver import Driver, Feed
from flatout.engine.benchmark.measuring.phases import gpu_util_pct
from flatout.engine.machine.runtime import Runtime
from flatout.engine.parameters import BenchmarkSettings
from flatout.engine.train.recording.timing import Window, steady
from flatout.engine.train.setup.assemble import Trainer

SPREAD_LIMIT_PCT = 5.0
"""If the spread of the throughput exceeds this percentage, a note reports it."""


@dataclass
class WarmTraining:
    """A training run that has been warmed up and is ready to measure windows."""

    driver: Driver
    feed_of: Callable[[int], Feed]
    feed: Feed
    measure: BenchmarkSettings
    first_step_s: float
    """Duration of the first, cold step in seconds."""
    step_s: float = math.inf
    """Duration of a warm step in seconds."""
    gpu_util_pct: list[float | None] = field(default_factory=list)
    """GPU utilisation at the end of each window, in percent."""

    @classmethod
    def up(
        cls,
        trainer: Trainer,
        feed_of: Callable[[int], Feed],
        measure: BenchmarkSettings,
    ) -> WarmTraining:
        driver, feed = Driver(trainer), feed_of(measure.steps_per_trial)
        begin = time.perf_counter()
        feed.step(driver)
        driver.synchronize()
        first_step_s = time.perf_counter() - begin
        for _ in range(measure.warmup_steps):
            feed.step(driver)
        return cls(driver, feed_of, feed, measure, first_step_s)

    def time_step(self) -> float:
        """Set `step_s` to the mean duration of two steps, and return it."""
        self.driver.synchronize()
        begin = time.perf_counter()
        for _ in range(2):
            self.feed.step(self.driver)
        self.driver.synchronize()
        self.step_s = same_on_all_ranks(
            (time.perf_counter() - begin) / 2, self._runtime
        )
        return self.step_s

    def shorten(self, steps: int) -> None:
        """If the block has more than `steps` steps, replace it with a shorter one. Then
        run one step to start the workers."""
        if steps < self.feed.period:  # new workers take seconds to start
            del self.feed  # free its workers and batches before new ones start
            self.feed = self.feed_of(steps)
        self.feed.step(self.driver)

    def window(self) -> Window:
        """Measure a window of whole blocks that lasts about `min_window_s`."""
        driver, feed, runtime = self.driver, self.feed, self._runtime
        passes = max(1, round(self.measure.min_window_s / (feed.period * self.step_s)))
        driver.synchronize()
        driver.window_clock.begin()
        for _ in range(passes * feed.period):
            feed.step(driver)
        driver.synchronize()
        compiles = same_on_all_ranks(driver.window_clock.compiles, runtime)
        window = driver.window_clock.close(int(compiles))
        self.gpu_util_pct.append(gpu_util_pct(runtime))
        # Replayed CUDA graphs are faster than the warm-up steps.
        self.step_s = same_on_all_ranks(
            min(self.step_s, window.wall_s / window.steps), runtime
        )
        return window

    def windows(self, most_apart_pct: float = SPREAD_LIMIT_PCT) -> list[Window]:
        """Measure windows until `enough` returns True. Return those without
        compilation."""
        self.shorten(block_steps(self.measure, self.time_step()))
        windows: list[Window] = []
        while not self._enough(windows, most_apart_pct):
            windows.append(self.window())
        return steady(windows)

    def _enough(self, windows: list[Window], most_apart_pct: float) -> bool:
        rates = [rate(window) for window in windows if window.clean]
        more = not enough(rates, len(windows), self.measure.repeats, most_apart_pct)
        return not same_on_all_ranks(float(more), self._runtime)

    def discard_ready_batches(self) -> None:
        """Discard the batches that the workers prefetched while this process was idle,
        because they would make the loader look faster than it is. Later windows still
        cover whole blocks."""
        loader = self.feed.loader
        ready = loader.num_workers * loader.settings.prefetch_factor if loader else 0
        for _ in range(ready):
            next(self.feed.batches)
        self.feed.step(self.driver)

    def window_after_rest(self) -> Window:
        """Measure a window after an idle period, without the prefetched batches."""
        self.discard_ready_batches()
        return self.window()

    @property
    def _runtime(self) -> Runtime:
        return self.driver.trainer.runtime


def block_steps(measure: BenchmarkSettings, step_s: float) -> int:
    """Return the number of steps of a block: as many as fit into a window, but at least
    two and at most `steps_per_trial`."""
    return max(2, min(measure.steps_per_trial, int(measure.max_window_s / step_s)))


def same_on_all_ranks(value: float, runtime: Runtime) -> float:
    """Return the maximum of `value` over all ranks. All ranks must run the same number
    of steps, so they must derive it from the same value."""
    if runtime.ranks.world_size == 1:
        return value
    shared = torch.tensor(value, dtype=torch.float64, device=runtime.device)
    torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
    return float(shared)


def enough(
    rates: Sequence[float],
    taken: int,
    repeats: int,
    most_apart_pct: float = SPREAD_LIMIT_PCT,
) -> bool:
    """Return whether enough windows have been measured: at least `repeats` valid ones,
    whose spread is at most `most_apart_pct`, or 2 * `repeats` + 1 of any kind. `rates`
    contains the throughput of each valid window, and `taken` counts all windows."""
    if taken > 2 * repeats:
        return True
    return len(rates) >= repeats and spread_of(rates) <= most_apart_pct


def middle(windows: Sequence[Window]) -> Window:
    """Return the window with the median throughput (the slower of two middle ones)."""
    return sorted(windows, key=rate)[(len(windows) - 1) // 2]


def rate(window: Window) -> float:
    """Return the window's throughput in samples/s."""
    return window.samples / window.wall_s


def spread_pct(windows: Sequence[Window]) -> float:
    """Return the spread (highest - lowest) / median of the throughput, in percent."""
    return spread_of([rate(window) for window in windows])


def spread_of(values: Sequence[float]) -> float:
    """Return the spread (highest - lowest) / median of `values`, in percent."""
    return 100 * (max(values) - min(values)) / median(values)
