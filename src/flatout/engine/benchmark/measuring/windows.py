"""Windows over the steps of a block, from which rates are computed.

One rule applies to all contenders of all modes. A window represents all rows. `enough`
decides their number, from at least `repeats`; all of them count except those with a
compilation; the rate is that of the median window. Short processes, which are no
contenders, measure the fewest.
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
"""A larger spread of the windows is reported, in percent."""


@dataclass
class WarmTraining:
    """A training past warm-up, on which windows are measured."""

    driver: Driver
    feed_of: Callable[[int], Feed]
    feed: Feed
    measure: BenchmarkSettings
    first_step_s: float
    """Seconds of the first, cold step."""
    step_s: float = math.inf
    """Seconds of a warm step."""
    gpu_util_pct: list[float | None] = field(default_factory=list)
    """The GPU's utilisation at the end of each window, in percent."""

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
        """Measure `step_s`, the mean of two steps."""
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
        """Shorten the block to `steps` if it has more, and start its workers."""
        if steps < self.feed.period:  # new workers need seconds to start
            del self.feed  # frees its workers and batches before the next ones start
            self.feed = self.feed_of(steps)
        self.feed.step(self.driver)

    def window(self) -> Window:
        """Measure whole blocks until `min_window_s` is over."""
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
        # Replayed graphs are faster than the warm-up was.
        self.step_s = same_on_all_ranks(
            min(self.step_s, window.wall_s / window.steps), runtime
        )
        return window

    def windows(self, most_apart_pct: float = SPREAD_LIMIT_PCT) -> list[Window]:
        """Return the windows that count: more of them if their rates differ more."""
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
        """Discard ready batches after a rest, because workers loaded them during it,
        which is not their rate; every window still covers whole blocks."""
        loader = self.feed.loader
        ready = loader.num_workers * loader.settings.prefetch_factor if loader else 0
        for _ in range(ready):
            next(self.feed.batches)
        self.feed.step(self.driver)

    def window_after_rest(self) -> Window:
        """Return the next window after a rest."""
        self.discard_ready_batches()
        return self.window()

    @property
    def _runtime(self) -> Runtime:
        return self.driver.trainer.runtime


def block_steps(measure: BenchmarkSettings, step_s: float) -> int:
    """Return the steps of a block that fit a window, at least two."""
    return max(2, min(measure.steps_per_trial, int(measure.max_window_s / step_s)))


def same_on_all_ranks(value: float, runtime: Runtime) -> float:
    """Return the highest value of all ranks: they must run the same number of steps."""
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
    """Return whether `rates` of the windows that count, of `taken` windows, are enough:
    `repeats` without compilations and close together, or twice `repeats` plus one."""
    if taken > 2 * repeats:
        return True
    return len(rates) >= repeats and spread_of(rates) <= most_apart_pct


def middle(windows: Sequence[Window]) -> Window:
    """Return the window with the median rate; of two, the slower one."""
    return sorted(windows, key=rate)[(len(windows) - 1) // 2]


def rate(window: Window) -> float:
    """Return the rate in samples/s."""
    return window.samples / window.wall_s


def spread_pct(windows: Sequence[Window]) -> float:
    """Return (highest - lowest) / median of the rates, in percent."""
    return spread_of([rate(window) for window in windows])


def spread_of(values: Sequence[float]) -> float:
    """Return (highest - lowest) / median, in percent."""
    return 100 * (max(values) - min(values)) / median(values)
