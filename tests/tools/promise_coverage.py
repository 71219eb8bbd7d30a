# ruff: noqa: T201
"""How often a tune's interval holds, and how wide it is, on machines made of noise.

    python -m tests.tools.promise_coverage

A machine has a rate whose logarithm is a sum: noise of each window, noise of each
process, and a wander that all processes share: a random walk, one that returns to its
mean, or spells of a slower speed. A tune takes windows at the moments at which mode
tune does on two quiet cores; the training begins 15 s after it and takes 40 s. The same
tunes are judged as of a virtual machine, quiet or beside other programs, and as of one
with a processor of its own. `--tunes` of each are drawn.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flatout.engine.benchmark.promise import (
    ON_CPU,
    ON_VIRTUAL_CPU,
    Prior,
    Promise,
    promised,
)

WINDOW_S, TICK_S = 0.8, 0.4
BEFORE_S, TRAINING_S = 15.0, 40.0
Layout = Sequence[tuple[float, int]]
"""When each process begins, in seconds, and its windows."""
TUNE: Layout = ((8, 4), (30, 2), *((40 + 3 * n, 2) for n in range(16)))
TWO: Layout = ((10, 4), (80, 4))


@dataclass(frozen=True)
class Machine:
    """Standard deviations are shares of the rate."""

    windows: float = 0.02
    processes: float = 0.01
    walk: float = 0.0
    """Of the change in a minute."""
    wander: float = 0.0
    wander_s: float = 60.0
    """After which it has forgotten two thirds of where it was."""
    slow: float = 1.0
    """Its other speed, as a share of the usual one."""
    slow_s: float = 60.0
    """Of a spell, on average."""
    every_s: float = 300.0

    @property
    def is_steady(self) -> bool:
        small = self.windows <= 0.08 and self.processes <= 0.04
        return small and self.walk <= 0.08 and not self.wander

    def level(self, seconds: float, draw: np.random.Generator) -> np.ndarray:
        """Of the logarithm, a value a tick."""
        count = int(seconds / TICK_S)
        steps = draw.normal(size=count) * math.sqrt(TICK_S)
        walk = self.walk * np.cumsum(steps) / math.sqrt(60)
        kept = math.exp(-TICK_S / self.wander_s)
        found, last = np.empty(count), draw.normal()
        for tick, fresh in enumerate(draw.normal(size=count)):
            found[tick] = last = kept * last + math.sqrt(1 - kept**2) * fresh
        return (
            walk + self.wander * found + math.log(self.slow) * self.spells(draw, count)
        )

    def spells(self, draw: np.random.Generator, count: int) -> np.ndarray:
        """Whether a tick is in one."""
        fast_s, found = self.every_s - self.slow_s, np.empty(count)
        inside = draw.random() * self.every_s < self.slow_s
        for tick, chance in enumerate(draw.random(count)):
            if chance * (self.slow_s if inside else fast_s) < TICK_S:
                inside = not inside
            found[tick] = inside
        return found

    def tuned(
        self, layout: Layout, draw: np.random.Generator
    ) -> tuple[list[list[float]], float]:
        """Rates of each process's windows, and what the training comes to."""
        begin = layout[-1][0] + 8 + BEFORE_S
        level = self.level(begin + TRAINING_S + 1, draw)

        def rate(at: float, seconds: float, process: float) -> float:
            ticks = level[int(at / TICK_S) : int((at + seconds) / TICK_S)]
            noise = self.windows * draw.normal() / math.sqrt(seconds / WINDOW_S)
            return 100 * math.exp(ticks.mean() + noise + process)

        trials = [
            [rate(at + 2 + n * WINDOW_S, WINDOW_S, process) for n in range(count)]
            for at, count in layout
            for process in [self.processes * draw.normal()]
        ]
        return trials, rate(begin, TRAINING_S, self.processes * draw.normal())


MACHINES = {
    "quiet: windows 2 %, processes 1 %": Machine(),
    "windows 8 %": Machine(windows=0.08),
    "windows 15 %": Machine(windows=0.15),
    "processes 2 %": Machine(processes=0.02),
    "processes 4 %": Machine(processes=0.04),
    "processes 8 %": Machine(processes=0.08),
    "walks 3 % a minute": Machine(walk=0.03),
    "walks 8 % a minute": Machine(walk=0.08),
    "walks 15 % a minute": Machine(walk=0.15),
    "wanders 10 % in 5 s": Machine(wander=0.1, wander_s=5),
    "wanders 10 % in 20 s": Machine(wander=0.1, wander_s=20),
    "wanders 10 % in 60 s": Machine(wander=0.1),
    "wanders 20 % in 60 s": Machine(wander=0.2),
    "wanders 15 % in 300 s": Machine(wander=0.15, wander_s=300),
    "0.8 of its speed for 60 of 300 s": Machine(slow=0.8),
    "0.8 of its speed for 20 of 100 s": Machine(slow=0.8, slow_s=20, every_s=100),
    "0.8 of its speed for 50 of 100 s": Machine(slow=0.8, slow_s=50, every_s=100),
}


@dataclass(frozen=True)
class Judged:
    """As of which machine."""

    prior: Prior = ON_CPU
    drifts: bool = True


QUIET_VIRTUAL = Judged(ON_VIRTUAL_CPU, drifts=False)
BUSY_VIRTUAL = Judged(ON_VIRTUAL_CPU)
OWN = Judged()


def coverage(
    machine: Machine, layout: Layout, tunes: int, judged: Judged = OWN, seed: int = 0
) -> tuple[float, float]:
    """Share of trainings inside, and half of the interval over the rate: the median."""
    draw = np.random.default_rng(seed)
    inside, halves = [], []
    for _ in range(tunes):
        trials, came = machine.tuned(layout, draw)
        promise: Promise = promised(trials, judged.prior, drifts=judged.drifts)
        assert promise.low is not None and promise.high is not None
        inside.append(promise.low <= came <= promise.high)
        halves.append((promise.high - promise.low) / 2 / promise.samples_per_s)
    return float(np.mean(inside)), float(np.median(halves))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tunes", type=int, default=1000)
    asked = parser.parse_args()
    columns = {
        "quiet, virtual": (TUNE, QUIET_VIRTUAL),
        "busy, virtual": (TUNE, BUSY_VIRTUAL),
        "own processor": (TUNE, OWN),
        "own, two processes": (TWO, OWN),
    }
    heads = [f"{name}: inside, % | half, %" for name in columns]
    print(f"| machine | {' | '.join(heads)} |")
    print("|---" * (1 + 2 * len(columns)) + "|")
    for name, machine in MACHINES.items():
        cells = [
            f"{100 * share:.0f} | {100 * half:.1f}"
            for layout, judged in columns.values()
            for share, half in [coverage(machine, layout, asked.tunes, judged)]
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
