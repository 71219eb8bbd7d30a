"""Windows over the steps of a block: what rates are made of.

One rule serves all contenders of all modes. A window speaks for all rows. As many are
taken as `enough` says, from the same `repeats`; all of them count but those into which
a compilation fell; the rate is that of the window in the middle. Short processes, which
are no contenders, take the fewest.
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
"""Windows further apart than this are said to be so."""


@dataclass
class Warm:
    """A training whose first steps are behind it: it takes windows."""

    driver: Driver
    feed_of: Callable[[int], Feed]
    feed: Feed
    measure: BenchmarkSettings
    first_step_s: float
    """Of the first, cold step."""
    step_s: float = math.inf
    """Of a warm one."""
    gpu_util_pct: list[float | None] = field(default_factory=list)
    """The GPU's at the end of each window."""

    @classmethod
    def up(
        cls,
        trainer: Trainer,
        feed_of: Callable[[int], Feed],
        measure: BenchmarkSettings,
    ) -> Warm:
        driver, feed = Driver(trainer), feed_of(measure.steps_per_trial)
        begin = time.perf_counter()
        feed.step(driver)
        driver.synchronize()
        first_step_s = time.perf_counter() - begin
        for _ in range(measure.warmup_steps):
            feed.step(driver)
        return cls(driver, feed_of, feed, measure, first_step_s)

    def time_step(self) -> float:
        """`step_s`, by two steps."""
        self.driver.synchronize()
        begin = time.perf_counter()
        for _ in range(2):
            self.feed.step(self.driver)
        self.driver.synchronize()
        self.step_s = agreed((time.perf_counter() - begin) / 2, self._runtime)
        return self.step_s

    def shorten(self, steps: int) -> None:
        """A block of `steps`, where it has more; its workers start now."""
        if steps < self.feed.period:  # other workers need seconds to start
            del self.feed  # its workers and batches go before the next ones come
            self.feed = self.feed_of(steps)
        self.feed.step(self.driver)

    def window(self) -> Window:
        """Whole blocks, again until `min_window_s` is over."""
        driver, feed, runtime = self.driver, self.feed, self._runtime
        passes = max(1, round(self.measure.min_window_s / (feed.period * self.step_s)))
        driver.synchronize()
        driver.window_clock.begin()
        for _ in range(passes * feed.period):
            feed.step(driver)
        driver.synchronize()
        compiles = agreed(driver.window_clock.compiles, runtime)
        window = driver.window_clock.close(int(compiles))
        self.gpu_util_pct.append(gpu_util_pct(runtime))
        # Replayed graphs are quicker than the warm-up was.
        self.step_s = agreed(min(self.step_s, step_seconds(window)), runtime)
        return window

    def windows(self, most_apart_pct: float = SPREAD_LIMIT_PCT) -> list[Window]:
        """Those that count: more of them where they lie further apart."""
        self.shorten(block_steps(self.measure, self.time_step()))
        windows: list[Window] = []
        while not self._enough(windows, most_apart_pct):
            windows.append(self.window())
        return steady(windows)

    def _enough(self, windows: list[Window], most_apart_pct: float) -> bool:
        rates = [rate(window) for window in windows if window.clean]
        more = not enough(rates, len(windows), self.measure.repeats, most_apart_pct)
        return not agreed(float(more), self._runtime)

    def lead_in(self) -> None:
        """After a rest: workers went on loading, which is no rate of theirs. What lies
        ready is thrown away; every window goes over whole blocks all the same."""
        loader = self.feed.loader
        ready = loader.num_workers * loader.settings.prefetch_factor if loader else 0
        for _ in range(ready):
            next(self.feed.batches)
        self.feed.step(self.driver)

    def rested_window(self) -> Window:
        """The next one after a rest."""
        self.lead_in()
        return self.window()

    @property
    def _runtime(self) -> Runtime:
        return self.driver.trainer.runtime


def block_steps(measure: BenchmarkSettings, step_s: float) -> int:
    """Steps of a block that fit a window, at least two."""
    return max(2, min(measure.steps_per_trial, int(measure.max_window_s / step_s)))


def agreed(value: float, runtime: Runtime) -> float:
    """The highest of all ranks: they must take the same number of steps."""
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
    """`rates` of those that count, of `taken` windows. `repeats` are enough that are
    free of compilations and together; at most twice as many and one are taken."""
    if taken > 2 * repeats:
        return True
    return len(rates) >= repeats and spread_of(rates) <= most_apart_pct


def middle(windows: Sequence[Window]) -> Window:
    """The window with the median rate; of two, the slower one."""
    return sorted(windows, key=rate)[(len(windows) - 1) // 2]


def step_seconds(window: Window) -> float:
    return window.wall_s / window.steps


def rate(window: Window) -> float:
    """Samples/s."""
    return window.samples / window.wall_s


def spread_pct(windows: Sequence[Window]) -> float:
    """(highest - lowest) / median of the rates."""
    return spread_of([rate(window) for window in windows])


def spread_of(values: Sequence[float]) -> float:
    """(highest - lowest) / median, in percent."""
    return 100 * (max(values) - min(values)) / median(values)
