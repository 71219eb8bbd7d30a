"""Health of a run: loss at chance level, gradients in the usual band, finite values."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from flatout.engine.machine.runtime import Runtime
from flatout.engine.train.recording.report import LogPoint
from flatout.engine.train.recording.timing import Rates, Window

INITIAL_LOSS_TOLERANCE = 0.5
"""Maximum first loss above chance of a model from scratch, in nats."""
DIVERGED = 3.0
"""Loss of a log point, in units of chance, from which on the training diverges."""
GRAD_NORM_BAND = (0.1, 10.0)
"""Usual norms are 0.1 to 1.0; more is tolerated because clipping bounds updates."""
CPU_WAIT_LIMIT_PCT = 25.0
"""Measured on two cores: below 10 without other programs, 32 to 45 with one, when one
thread trained two to six times as fast as two."""
LOADER_WAIT_LIMIT_PCT = 25.0
"""Share of step time spent waiting for batches. On two cores, which workers share with
the steps, 2 to 15 is usual."""
FEW_ROWS = 5
"""Minimum test rows per class: below, one row changes accuracy by over a fifth."""


class NonFiniteError(RuntimeError):
    """Loss or gradient is NaN or infinite; the step was not applied."""

    exit_code = 5


def initial_loss_warning(loss: float, chance: float | None) -> str | None:
    """Warn if the first loss is far above chance: wrong head, labels or rate."""
    if chance is None or not loss > chance + INITIAL_LOSS_TOLERANCE:
        return None  # the loss of a first step without a target is NaN
    return (
        f"the first loss is {loss:.2f}, chance is {chance:.2f}: check labels, "
        "tokenizer and model belong together"
    )


def divergence_warning(history: Sequence[LogPoint], chance: float | None) -> str | None:
    """Warn if the loss of a log point is far above chance."""
    worst = max(history, key=lambda point: point.loss, default=None)
    if not chance or worst is None or not worst.loss > DIVERGED * chance:
        return None
    return (
        f"the loss is {worst.loss:.4g} at step {worst.step}, chance is {chance:.2f}: "
        f"the learning rate of {worst.learning_rate:.3g} is too high. Lower "
        "train.learning_rate, to about 5e-5 for a checkpoint, 1e-3 from scratch"
    )


def has_learned(history: Sequence[LogPoint], chance: float | None) -> bool:
    """Return whether the loss is below half of chance, or of its first value: small
    gradients are normal then."""
    first = max(history[0].loss, chance or 0.0) if history else 0.0
    return bool(history) and history[-1].loss < first / 2


def grad_norm_warning(norms: list[float], *, has_learned: bool = False) -> str | None:
    """Warn if the median gradient norm of the log points is outside the usual band."""
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
    """Warn if steps wait for batches, which leaves the device idle."""
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
    """Warn if the rarest class has too few test rows for a meaningful accuracy.
    `counts` has the rows of each class, by its number as text; empty without classes.
    """
    rows = {name: counts.get(str(n), 0) for n, name in enumerate(label_names)}
    rarest = min(rows, key=rows.__getitem__, default="")
    if not counts or not rows or rows[rarest] >= FEW_ROWS:
        return None
    return (
        f"test_accuracy is imprecise: the test split has {rows[rarest]} rows of the "
        f"class {rarest!r}. Provide more rows, or raise split.fractions.test"
    )


def cpu_wait_warning(wait_pct: float | None, threads: int, on_cpu: bool) -> str | None:
    """Warn if threads wait for cores: one delayed thread delays the whole product."""
    if not on_cpu or threads < 2 or (wait_pct or 0.0) < CPU_WAIT_LIMIT_PCT:
        return None
    return (
        f"for {wait_pct:.0f} % of the time this process waited for a core in use by "
        f"others, and its {threads} threads for each other: end those programs, or "
        f"set runtime.threads: {threads - 1}"
    )


logger = logging.getLogger(__name__)

FIRST_POINTS = 5
"""Number of log points that are checked at once; later checks are at evaluations."""
FEWEST_POINTS = 3
"""Minimum number of log points for a median gradient norm or a wait share."""


class HealthWatch:
    """Reports each problem once, when it is first detected."""

    def __init__(
        self, runtime: Runtime, chance_loss: float | None, num_workers: int = 0
    ) -> None:
        self._runtime = runtime
        self._chance_loss = chance_loss
        self.num_workers = num_workers
        self._found: dict[str, str] = {}

    @property
    def warnings(self) -> list[str]:
        """Warnings in the order of detection."""
        return list(self._found.values())

    def look(
        self,
        initial_loss: float,
        history: Sequence[LogPoint],
        windows: Sequence[Window],
        cpu_wait_pct: float | None,
    ) -> None:
        """Check all figures and warn of new problems."""
        norms = [point.grad_norm for point in history]
        enough = len(norms) >= FEWEST_POINTS
        learned = has_learned(history, self._chance_loss)
        waits = Rates.over(list(windows)).loader_wait_pct if windows else 0.0
        on_cpu, threads = not self._runtime.is_cuda, self._runtime.threads
        found = {
            "loss": initial_loss_warning(initial_loss, self._chance_loss)
            or divergence_warning(history, self._chance_loss),
            "norm": grad_norm_warning(norms, has_learned=learned) if enough else None,
            "cpu": cpu_wait_warning(cpu_wait_pct, threads, on_cpu=on_cpu),
            "loader": loader_wait_warning(
                waits if len(windows) >= FEWEST_POINTS else 0.0, self.num_workers
            ),
        }
        for kind, text in found.items():
            if text:
                self.warn(kind, text)

    def warn(self, kind: str, text: str) -> None:
        """Log a warning, once per `kind`."""
        if kind in self._found:
            return
        self._found[kind] = text
        if self._runtime.ranks.is_main:
            logger.warning(text)
