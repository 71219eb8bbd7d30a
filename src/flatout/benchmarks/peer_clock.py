"""The clock that every contender trains under."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass
class PeerClock:
    """Training seconds of a contender, and its validation curve."""

    runtime: Runtime
    total_steps: int
    judge: Callable[[], Evaluation]
    """The same code for all."""
    samples: int = 0
    steps: int = 0
    seconds: float = 0.0
    first_step_s: float = 0.0
    """Of `seconds`: loading, compiling and whatever else comes once."""
    rated_from: tuple[float, int] = (0.0, 0)
    """Seconds and samples at the end of the warm-up."""
    curve: list[dict[str, float]] = field(default_factory=list)
    last: Evaluation | None = None
    peaks: dict[str, float] = field(default_factory=dict)
    _since: float = 0.0

    def start(self) -> None:
        self._since = time.perf_counter()

    def step_done(self, samples: int) -> None:
        """After every optimizer step; waits for the device only after the first one,
        at the warm-up's end and where the model is judged."""
        self.steps += 1
        self.samples += samples
        every = max(1, self.total_steps // EVALUATIONS)
        due = self.steps % every == 0 or self.steps == self.total_steps
        first, warm = self.steps == 1, self.steps == WARMUP_STEPS
        if not (due or warm or first):
            return
        self.runtime.synchronize()
        self.seconds += time.perf_counter() - self._since
        if first:
            compile_clock.first_step_done()
            self.first_step_s = self.seconds
        if warm:
            self.rated_from = (self.seconds, self.samples)
        if due:
            self._judge()
        self._since = time.perf_counter()

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
        warm_s, warm_samples = self.rated_from
        rated_s = self.seconds - warm_s
        last = self.last or Evaluation(float("nan"), None)
        self._note_memory()
        return {
            **self.peaks,
            "samples_per_s": (self.samples - warm_samples) / rated_s,
            "total_ms": 1000 * rated_s / max(1, self.steps - WARMUP_STEPS),
            "train_s": self.seconds,
            "first_step_s": self.first_step_s,
            "steps": self.steps,
            "samples": self.samples,
            "curve": self.curve,
            "validation_loss": last.loss,
            "validation_accuracy": last.accuracy,
        }
