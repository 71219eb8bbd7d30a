"""Measure throughput over windows of steps between two device synchronisations.

Throughput is the number of samples divided by the wall time. If the loader needs more
time than this to build the same batches, some batches were ready before the window
began. In that case, the loader's time is used instead. The functions here never
synchronise the device. The caller must do so before closing a window.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Any

import numpy as np
import torch

from flatout.engine.batches.collation import StepBatch

COUNTED = ("samples", "tokens", "padded_tokens", "attention_pairs", "targets")
"""The quantities that are summed over the batches of a window."""
WARMUP_STEPS = 3
"""The number of steps before the first window. Memory allocation, autotuning and the
first compilation happen in these steps."""


@dataclass(frozen=True)
class Window:
    """Sums over the steps between two logging steps."""

    steps: int
    samples: int
    tokens: int
    padded_tokens: int
    attention_pairs: int
    targets: int
    wall_s: float
    wait_s: float
    step_ms: list[float]
    clean: bool
    """Whether there was no compilation or graph capture during the window."""
    loader_s: float = 0.0
    """The seconds that the loader's workers need to build the window's batches."""


class WindowClock:
    """Times the steps of a window. `close` returns the window and begins a new one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.begin()

    def begin(self) -> None:
        """Begin a new window. The device must be idle."""
        self._steps: list[tuple[Any, Any, Any, float]] = []
        """Three device timestamps per step (end of the previous step, start, end), and
        the host's waiting time in seconds."""
        self._counts = [0] * len(COUNTED)
        self._wall_s = 0.0
        self._compiles = compile_clock.count
        self.resume()

    def pause(self) -> None:
        """Exclude the time until `resume` is called. The device must be idle."""
        self._wall_s += time.perf_counter() - self._running_since

    def resume(self) -> None:
        self._running_since = time.perf_counter()
        self._last_end = mark(self._device)

    def step_begins(self) -> None:
        self._step_begin = mark(self._device)

    def step_ends(self, batch: StepBatch, wait_s: float) -> None:
        """Add a step. `wait_s` is the time that the host waited for its batch."""
        end = mark(self._device)
        self._steps.append((self._last_end, self._step_begin, end, wait_s))
        self._last_end = end
        found = (
            batch.num_samples,
            batch.num_tokens,
            batch.num_padded_tokens,
            batch.attention_pairs,
            batch.num_targets,
        )
        self._counts = list(map(add, self._counts, found))

    @property
    def compiles(self) -> int:
        """The number of compilations and graph captures on this rank in the window."""
        return compile_clock.count - self._compiles

    def close(self, compiles: int | None = None, batch_s: float = 0.0) -> Window:
        """Return the current window and begin the next one. All ranks wait for the
        slowest one, so `compiles` and `batch_s` (the loader's seconds per batch) are
        maxima over ranks. The caller must have synchronised the device."""
        self.pause()
        clean = (self.compiles if compiles is None else compiles) == 0
        window = self._window(clean, batch_s)
        self.begin()
        return window

    def _window(self, clean: bool, batch_s: float) -> Window:
        return Window(
            steps=len(self._steps),
            **dict(zip(COUNTED, self._counts, strict=True)),
            wall_s=self._wall_s,
            # Waiting only counts if the device is idle.
            wait_s=sum(
                min(elapsed_s(before, begin), host_wait_s)
                for before, begin, _, host_wait_s in self._steps
            ),
            step_ms=[1000 * elapsed_s(a, b) for a, _, b, _ in self._steps],
            clean=clean,
            loader_s=len(self._steps) * batch_s,
        )


def mark(device: torch.device) -> Any:
    """Return a timestamp for `elapsed_s`, which the device takes when it gets there."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def elapsed_s(begin: Any, end: Any) -> float:
    """Return the seconds between two timestamps. The device must be synchronised."""
    if isinstance(begin, float):
        return float(end - begin)
    return max(0.0, float(begin.elapsed_time(end)) / 1000)


@dataclass
class CompileClock:
    """Counts and times the compilations in this process. TorchDynamo reports them
    through callbacks."""

    seconds: float = 0.0
    count: int = 0
    _in_first_step: int = 0
    _begin: float | None = None
    _listening: bool = False

    def listen(self) -> None:
        if self._listening:
            return
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(self._started)
        callback_handler.register_end_callback(self._ended)
        self._listening = True

    @property
    def running(self) -> bool:
        return self._begin is not None

    @property
    def recompiles(self) -> int:
        """The number of compilations and graph captures after the first step."""
        return self.count - self._in_first_step

    def first_step_done(self) -> None:
        self._in_first_step = self.count

    def add(self, seconds: float) -> None:
        """Count a compilation, or the capture of a CUDA graph, that took `seconds`."""
        self.seconds += seconds
        self.count += 1

    def _started(self, *_: Any) -> None:
        self._begin = time.perf_counter()

    def _ended(self, *_: Any) -> None:
        if self._begin is not None:
            self.add(time.perf_counter() - self._begin)
        self._begin = None


compile_clock = CompileClock()
"""The clock of this process. It is global because TorchDynamo's callbacks are."""


@dataclass(frozen=True)
class Rates:
    """Throughput and step times over all windows without compilation. If there are
    none, all windows are used."""

    samples_per_s: float
    tokens_per_s: float
    padded_tokens_per_s: float
    padding_pct: float
    loader_wait_pct: float
    step_ms_p50: float
    step_ms_p90: float

    @classmethod
    def over(cls, windows: list[Window]) -> Rates:
        chosen = steady(windows)
        seconds = seconds_of(chosen)
        stored_s = seconds - sum(window.wall_s for window in chosen)
        tokens = sum(window.tokens for window in chosen)
        padded = sum(window.padded_tokens for window in chosen)
        step_ms = [ms for window in chosen for ms in window.step_ms] or [float("nan")]
        return cls(
            samples_per_s=sum(window.samples for window in chosen) / seconds,
            tokens_per_s=tokens / seconds,
            padded_tokens_per_s=padded / seconds,
            padding_pct=100 * (1 - tokens / padded) if padded else 0.0,
            loader_wait_pct=100 * (stored_s + sum(w.wait_s for w in chosen)) / seconds,
            step_ms_p50=float(np.percentile(step_ms, 50)),
            step_ms_p90=float(np.percentile(step_ms, 90)),
        )


def steady(windows: Sequence[Any]) -> list[Any]:
    """Return the windows without compilation, or all of them if there are none."""
    return [window for window in windows if window.clean] or list(windows)


def seconds_of(windows: Sequence[Window]) -> float:
    """Return the seconds from which the throughput of `windows` is computed: the wall
    time or the loader's time, whichever is larger. They are compared as sums, because
    one window may get several batches at once and the next one none."""
    wall_s = sum(window.wall_s for window in windows)
    return max(wall_s, sum(window.loader_s for window in windows)) or float("nan")
