"""The clock that every contender trains under."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median_low
from typing import Any

import torch

from flatout.engine.report import Evaluation
from flatout.engine.runtime import Runtime, memory
from flatout.engine.timing import WARMUP_STEPS, compile_clock

MEMORY_COLUMNS = {
    "peak_allocated_gib": "peak_memory_gib",
    "peak_reserved_gib": "reserved_memory_gib",
}
EVALUATIONS = 10
"""Points of a validation curve."""
Mark = tuple[float, int]
"""Training seconds and samples so far."""


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
    """The rate is the median of windows of so many steps behind the warm-up; None: one
    window to the end."""
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

    def step_done(self, samples: int) -> None:
        """After every optimizer step; waits for the device only after the first one,
        at the ends of warm-up and windows, and where the model is judged."""
        self.steps += 1
        self.samples += samples
        due, marked = self._evaluation_due(), self._ends_a_window()
        first, last = self.steps == 1, self.steps == self.total_steps
        if not (due or marked or first or last):
            return
        self.runtime.synchronize()
        self.seconds += time.perf_counter() - self._since
        if first:
            compile_clock.first_step_done()
            self.first_step_s = self.seconds
        if marked:
            self.marks.append((self.seconds, self.samples))
        if due:
            self._judge()
        self._since = time.perf_counter()

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
        last = self.last or Evaluation(float("nan"), None)
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
        """The median window's."""
        marks = self.marks if len(self.marks) > 1 else [(0.0, 0), *self.marks]
        rates = [
            (samples - samples_before) / (seconds - seconds_before)
            for (seconds_before, samples_before), (seconds, samples) in pairwise(marks)
        ]
        rate = median_low(rates)
        spread = 100 * (max(rates) - min(rates)) / rate if len(rates) > 1 else None
        return {
            "samples_per_s": rate,
            "samples_per_s_spread_pct": spread,
            "window_samples_per_s": rates,
            "total_ms": 1000 * self.samples / self.steps / rate,
        }
