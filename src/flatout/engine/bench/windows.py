"""Windows over the steps of a block: what rates are made of."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from flatout.engine.assemble import Trainer
from flatout.engine.bench.driver import Driver, Feed
from flatout.engine.bench.trial_spec import Measure
from flatout.engine.runtime import Runtime
from flatout.engine.timing import Window, steady

SPREAD_LIMIT_PCT = 5.0
"""Windows further apart than this are said to be so."""


@dataclass
class Warm:
    """A training whose first steps are behind it: it takes windows."""

    driver: Driver
    feed_of: Callable[[int], Feed]
    feed: Feed
    measure: Measure
    first_step_s: float
    """Of the first, cold step."""
    step_s: float = math.inf
    """Of a warm one."""

    @classmethod
    def up(
        cls, trainer: Trainer, feed_of: Callable[[int], Feed], measure: Measure
    ) -> Warm:
        driver, feed = Driver(trainer), feed_of(measure.steps)
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
        driver.clock.begin()
        for _ in range(passes * feed.period):
            feed.step(driver)
        driver.synchronize()
        compiles = agreed(driver.clock.compiles, runtime)
        window = driver.clock.close(int(compiles))
        # Replayed graphs are quicker than the warm-up was.
        self.step_s = agreed(min(self.step_s, step_seconds(window)), runtime)
        return window

    def windows(self) -> list[Window]:
        """Fastest first. Where compilations, graph captures or other processes spoil
        some, up to twice as many and one more are taken."""
        self.shorten(block_steps(self.measure, self.time_step()))
        windows: list[Window] = []
        for _ in range(2 * self.measure.repeats + 1):
            windows.append(self.window())
            chosen = fastest_windows(windows, self.measure.repeats)
            enough = len(chosen) == self.measure.repeats
            unsteady = not enough or spread_pct(chosen) > SPREAD_LIMIT_PCT
            if not agreed(float(unsteady), self._runtime):
                break
        return chosen

    def lead_in(self) -> None:
        """After a rest: workers went on loading, which is no rate of theirs. What lies
        ready is thrown away; every window goes over whole blocks all the same."""
        loader = self.feed.loader
        ready = loader.num_workers * loader.settings.prefetch_factor if loader else 0
        for _ in range(ready):
            next(self.feed.batches)
        self.feed.step(self.driver)

    @property
    def _runtime(self) -> Runtime:
        return self.driver.trainer.runtime


def block_steps(measure: Measure, step_s: float) -> int:
    """Steps of a block that fit a window, at least two."""
    return max(2, min(measure.steps, int(measure.max_window_s / step_s)))


def agreed(value: float, runtime: Runtime) -> float:
    """The highest of all ranks: they must take the same number of steps."""
    if runtime.ranks.world_size == 1:
        return value
    shared = torch.tensor(value, dtype=torch.float64, device=runtime.device)
    torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
    return float(shared)


def fastest_windows(windows: list[Window], count: int) -> list[Window]:
    """The fastest `count` among clean windows: all go over the same rows, so what is
    slower was disturbed, by a compilation or by another process."""
    return sorted(steady(windows), key=step_seconds)[:count]


def step_seconds(window: Window) -> float:
    return window.wall_s / window.steps


def rate(window: Window) -> float:
    """Samples/s."""
    return window.samples / window.wall_s


def spread_pct(windows: list[Window]) -> float:
    """(highest - lowest) / median of the rates."""
    return spread_of([rate(window) for window in windows])


def spread_of(values: list[float]) -> float:
    """(highest - lowest) / median, in percent."""
    return 100 * (max(values) - min(values)) / median(values)
