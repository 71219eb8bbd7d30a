"""The clock that every contender trains under."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from flatout.engine.benchmark.measuring.windows import enough, middle, rate, spread_pct
from flatout.engine.machine.runtime import Runtime, memory
from flatout.engine.train.recording.report import Evaluation
from flatout.engine.train.recording.timing import WARMUP_STEPS, compile_clock, steady

MEMORY_COLUMNS = {
    "peak_allocated_gib": "peak_memory_gib",
    "peak_reserved_gib": "reserved_memory_gib",
}
EVALUATIONS = 10
"""Points of a validation curve."""


@dataclass(frozen=True)
class Mark:
    """So far, while training."""

    seconds: float = 0.0
    samples: int = 0
    compiles: int = 0


@dataclass(frozen=True)
class Stretch:
    """A window between two marks."""

    before: Mark
    end: Mark

    @property
    def samples(self) -> int:
        return self.end.samples - self.before.samples

    @property
    def wall_s(self) -> float:
        return self.end.seconds - self.before.seconds

    @property
    def clean(self) -> bool:
        """No compilation fell into it."""
        return self.end.compiles == self.before.compiles


@dataclass
class PeerClock:
    """Training seconds of a contender, and its validation curve."""

    runtime: Runtime
    total_steps: int
    judge: Callable[[], Evaluation]
    """The same code for all."""
    evaluations: int = EVALUATIONS
    """0: none; the rate alone is asked."""
    warmup_steps: int = WARMUP_STEPS
    window_steps: int | None = None
    """Of a window behind the warm-up; None: one window to the end."""
    repeats: int | None = None
    """The training is over when so many windows are taken (see `enough`); None: at its
    own end."""
    samples: int = 0
    steps: int = 0
    seconds: float = 0.0
    first_step_s: float = 0.0
    """Of `seconds`: loading, compiling and whatever else comes once."""
    marks: list[Mark] = field(default_factory=list)
    """At the ends of warm-up and windows."""
    curve: list[dict[str, float]] = field(default_factory=list)
    last: Evaluation | None = None
    peaks: dict[str, float] = field(default_factory=dict)
    _since: float = 0.0

    def start(self) -> None:
        self._since = time.perf_counter()

    def step_done(self, samples: int) -> bool:
        """After every optimizer step; True where training may end. Waits for the device
        only after the first one, at the ends of warm-up and windows, and where the
        model is judged."""
        self.steps += 1
        self.samples += samples
        due, marked = self._evaluation_due(), self._ends_a_window()
        first, last = self.steps == 1, self.steps == self.total_steps
        if not (due or marked or first or last):
            return False
        self.runtime.synchronize()
        self.seconds += time.perf_counter() - self._since
        if first:
            compile_clock.first_step_done()
            self.first_step_s = self.seconds
        if marked:
            self.marks.append(Mark(self.seconds, self.samples, compile_clock.count))
        if due:
            self._judge()
        self._since = time.perf_counter()
        return marked and self._enough()

    def _enough(self) -> bool:
        if self.repeats is None:
            return False
        windows = self._windows()
        rates = [rate(window) for window in windows if window.clean]
        return enough(rates, len(windows), self.repeats)

    def _windows(self) -> list[Stretch]:
        return [Stretch(before, end) for before, end in pairwise(self.marks)]

    def _evaluation_due(self) -> bool:
        if not self.evaluations:
            return False
        every = max(1, self.total_steps // self.evaluations)
        return self.steps % every == 0 or self.steps == self.total_steps

    def _ends_a_window(self) -> bool:
        """The last step ends one where there is no other."""
        behind = self.steps - self.warmup_steps
        if self.steps == self.total_steps and len(self.marks) < 2:
            return True
        if behind <= 0 or self.window_steps is None:
            return behind == 0
        return behind % self.window_steps == 0

    def _judge(self) -> None:
        """Its memory is not the contender's."""
        self._note_memory()
        self.last = self.judge()
        if self.runtime.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.runtime.device)
        self.curve.append(
            {
                "step": self.steps,
                "seconds": self.seconds,
                "validation_loss": self.last.loss,
            }
        )

    def _note_memory(self) -> None:
        peaks = memory(self.runtime)
        for name, column in MEMORY_COLUMNS.items():
            self.peaks[column] = max(self.peaks.get(column, 0.0), peaks[name])

    def figures(self) -> dict[str, Any]:
        last = self.last or Evaluation(float("nan"))
        self._note_memory()
        return {
            **self.peaks,
            **self._rate(),
            "train_s": self.seconds,
            "first_step_s": self.first_step_s,
            "steps": self.steps,
            "samples": self.samples,
            "curve": self.curve,
            "validation_loss": last.loss,
            "validation_accuracy": last.accuracy,
        }

    def _rate(self) -> dict[str, Any]:
        """By the rule of `bench.windows`."""
        windows = steady(self._windows() or [Stretch(Mark(), self.marks[-1])])
        found = rate(middle(windows))
        return {
            "samples_per_s": found,
            "samples_per_s_spread_pct": spread_pct(windows) if windows[1:] else None,
            "window_samples_per_s": [rate(window) for window in windows],
            "total_ms": 1000 * self.samples / self.steps / found,
        }
