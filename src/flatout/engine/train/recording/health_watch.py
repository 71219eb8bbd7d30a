"""Judges a training while it goes on, so that a long one hears of it in minutes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from flatout.engine.machine.runtime import Runtime
from flatout.engine.train.recording import health
from flatout.engine.train.recording.report import LogPoint
from flatout.engine.train.recording.timing import Rates, Window

logger = logging.getLogger(__name__)

FIRST_POINTS = 5
"""Log points that are judged as they come; behind them it is at evaluations."""
FEWEST_POINTS = 3
"""Behind which a median of gradient norms, or a share of waiting, says something."""


class HealthWatch:
    """Each illness is told once, when it is first seen."""

    def __init__(
        self, runtime: Runtime, chance_loss: float | None, num_workers: int
    ) -> None:
        self._runtime = runtime
        self._chance_loss = chance_loss
        self._num_workers = num_workers
        self._told: dict[str, str] = {}

    @property
    def warnings(self) -> list[str]:
        """In the order in which they were seen."""
        return list(self._told.values())

    def look(
        self,
        initial_loss: float,
        history: Sequence[LogPoint],
        windows: Sequence[Window],
        cpu_wait_pct: float | None,
    ) -> None:
        """Warn of what is new."""
        norms = [point.grad_norm for point in history]
        enough = len(norms) >= FEWEST_POINTS
        waits = Rates.over(list(windows)).loader_wait_pct if windows else 0.0
        on_cpu, threads = not self._runtime.is_cuda, self._runtime.threads
        found = {
            "loss": health.initial_loss_warning(initial_loss, self._chance_loss),
            "norm": health.grad_norm_warning(norms) if enough else None,
            "cpu": health.cpu_wait_warning(cpu_wait_pct, threads, on_cpu=on_cpu),
            "loader": health.loader_wait_warning(
                waits if len(windows) >= FEWEST_POINTS else 0.0, self._num_workers
            ),
        }
        for kind, text in found.items():
            if text and kind not in self._told:
                self._told[kind] = text
                if self._runtime.ranks.is_main:
                    logger.warning(text)
