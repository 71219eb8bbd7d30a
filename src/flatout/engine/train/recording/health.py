"""Check the health of a run: the loss compared with that of random guesses (the chance
loss), gradient norms, waiting times and the state of the machine."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from flatout.engine.machine.runtime import Runtime
from flatout.engine.train.recording.report import LogPoint
from flatout.engine.train.recording.timing import Rates

if TYPE_CHECKING:
    from flatout.engine.train.recording.recorder import Recorder

INITIAL_LOSS_TOLERANCE = 0.5
"""The amount, in nats, by which the first loss may exceed the chance loss."""
DIVERGED = 3.0
"""A run has diverged if a logged loss exceeds this multiple of the chance loss."""
GRAD_NORM_BAND = (0.1, 10.0)
"""The range of median gradient norms without a warning. Usual norms are 0.1 to 1.0.
Larger norms are tolerated, because clipping limits the updates."""
CPU_WAIT_LIMIT_PCT = 25.0
"""The maximum percentage of time that the training thread may wait for a core without a
warning. On two cores, one other program raised it from below 10 % to between 32 and 45
%. One thread then trained two to six times as fast as two threads."""
LOADER_WAIT_LIMIT_PCT = 25.0
"""The maximum percentage of step time for which steps may wait for batches without a
warning. If workers and steps share two cores, 2 to 15 % is usual."""
FEW_ROWS = 5
"""The minimum number of test rows per class. With fewer rows, a single row changes the
accuracy for its class by more than a fifth."""

CLOCK_EVERY_S = 10.0
"""The minimum time in seconds between two readings of the GPU's clock rate. Each
reading takes about 1 ms."""
SCHEDULER = Path("/proc/thread-self/schedstat")


class NonFiniteError(RuntimeError):
    """Raised if a loss or gradient is NaN or infinite. The weights were not updated."""

    exit_code = 5


def initial_loss_warning(loss: float, chance: float | None) -> str | None:
    """Return a warning if the first loss is far above the chance loss, else None. A
    high loss may mean that the tokenizer, the model and the labels do not match."""
    if chance is None or not loss > chance + INITIAL_LOSS_TOLERANCE:
        return None  # the loss of a first step without a target is NaN
    return (
        f"the first loss is {loss:.2f}, chance is {chance:.2f}: check labels, "
        "tokenizer and model belong together"
    )


def divergence_warning(history: Sequence[LogPoint], chance: float | None) -> str | None:
    """Return a warning if a logged loss is far above the chance loss, else None."""
    worst = max(history, key=lambda point: point.loss, default=None)
    if not chance or worst is None or not worst.loss > DIVERGED * chance:
        return None
    return (
        f"the loss is {worst.loss:.4g} at step {worst.step}, chance is {chance:.2f}: "
        f"the learning rate of {worst.learning_rate:.3g} is too high. Lower "
        "train.learning_rate, to about 5e-5 for a checkpoint, 1e-3 from scratch"
    )


def has_learned(history: Sequence[LogPoint], chance: float | None) -> bool:
    """Return whether the last loss is below half of the first loss or of the chance
    loss, whichever is higher. In that case, small gradients are normal."""
    first = max(history[0].loss, chance or 0.0) if history else 0.0
    return bool(history) and history[-1].loss < first / 2


def grad_norm_warning(norms: list[float], *, has_learned: bool = False) -> str | None:
    """Return a warning if the median of the logged gradient norms is unusual."""
    finite = sorted(norm for norm in norms if math.isfinite(norm))
    if not finite:
        return None
    median = finite[len(finite) // 2]
    low, high = GRAD_NORM_BAND
    if median > high:
        return (
            f"gradient norm is unusually high: {median:.3g} in the median, usual is at "
            f"most {high:g}. Lower train.learning_rate"
        )
    if median < low and not has_learned:
        return (
            f"gradient norm is unusually low: {median:.3g} in the median, usual is at "
            f"least {low:g}. Little is learned: raise train.learning_rate, or look at "
            "train.freeze and the labels"
        )
    return None


def loader_wait_warning(wait_pct: float, num_workers: int) -> str | None:
    """Return a warning if steps often wait for batches while the device is idle."""
    if wait_pct < LOADER_WAIT_LIMIT_PCT:
        return None
    return (
        f"steps waited for the loader for {wait_pct:.0f} % of their time, with "
        f"{num_workers} workers: raise train.loader.num_workers, or find out why with "
        "kedro run --pipelines=benchmark --params=benchmark.profile=true"
    )


def few_rows_warning(
    counts: Mapping[str, int], label_names: Sequence[str]
) -> str | None:
    """Return a warning if a class has too few test rows for a meaningful accuracy.
    `counts` contains the number of rows per class, with class numbers as strings. It is
    empty if there are no classes."""
    rows = {name: counts.get(str(n), 0) for n, name in enumerate(label_names)}
    rarest = min(rows, key=rows.__getitem__, default="")
    if not counts or not rows or rows[rarest] >= FEW_ROWS:
        return None
    return (
        f"test_accuracy is imprecise: the test split has {rows[rarest]} rows of the "
        f"class {rarest!r}. Provide more rows, or raise split.fractions.test"
    )


def cpu_wait_warning(wait_pct: float | None, threads: int, on_cpu: bool) -> str | None:
    """Return a warning if threads often wait for cores. One late thread delays a whole
    matrix multiplication."""
    if not on_cpu or threads < 2 or (wait_pct or 0.0) < CPU_WAIT_LIMIT_PCT:
        return None
    return (
        f"for {wait_pct:.0f} % of the time this process waited for a core in use by "
        f"others, and its {threads} threads for each other: end those programs, or "
        f"set runtime.threads: {threads - 1}"
    )


FIRST_POINTS = 5
"""Health is checked at this many log points at the start of a session. Later, it is
checked at each evaluation."""
FEWEST_POINTS = 3
"""The minimum number of log points to judge gradient norms and loader waits."""


def find_problems(recorder: Recorder) -> dict[str, str | None]:
    """Return a warning, or None, for each kind of problem that a run can have."""
    history, windows = recorder.history, recorder.windows
    runtime, chance = recorder.trainer.runtime, recorder.chance_loss
    norms = [point.grad_norm for point in history]
    enough, learned = len(norms) >= FEWEST_POINTS, has_learned(history, chance)
    judged = windows if len(windows) >= FEWEST_POINTS else []
    waits = Rates.over(judged).loader_wait_pct if judged else 0.0
    workers = recorder.loader.num_workers if recorder.loader else 0
    cpu_wait_pct = recorder.conditions.figures()["cpu_wait_pct"]
    return {
        "loss": initial_loss_warning(recorder.initial_loss, chance)
        or divergence_warning(history, chance),
        "norm": grad_norm_warning(norms, has_learned=learned) if enough else None,
        "cpu": cpu_wait_warning(cpu_wait_pct, runtime.threads, not runtime.is_cuda),
        "loader": loader_wait_warning(waits, workers),
    }


class Conditions:
    """Measures the time spent waiting for CPU cores, and the GPU's clock rate.
    Samples are taken at logging steps, which synchronise the device anyway."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._clocks_mhz: list[float] = []
        self._next_clock_s = 0.0
        self.start()

    def start(self) -> None:
        """Begin the period over which waiting for cores is measured."""
        self._begin_s, self._begin_wait_s = time.perf_counter(), waited_for_core_s()
        self._wait_pct: float | None = None

    def sample(self) -> None:
        now_s, wait_s = time.perf_counter(), waited_for_core_s()
        if wait_s is not None and self._begin_wait_s is not None:
            wall_s = max(now_s - self._begin_s, 1e-9)
            self._wait_pct = 100 * (wait_s - self._begin_wait_s) / wall_s
        if self._runtime.is_cuda and now_s >= self._next_clock_s:
            self._next_clock_s = now_s + CLOCK_EVERY_S
            with suppress(Exception):  # some drivers do not report the clock rate
                clock_mhz = torch.cuda.clock_rate(self._runtime.device)
                self._clocks_mhz.append(float(clock_mhz))

    def figures(self) -> dict[str, Any]:
        clocks = self._clocks_mhz
        return {
            "cpu_wait_pct": self._wait_pct,
            "gpu_clock_mhz": median(clocks) if clocks else None,
        }


def waited_for_core_s() -> float | None:
    """Return the seconds for which this thread has waited for a core, if known."""
    try:
        return int(SCHEDULER.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
