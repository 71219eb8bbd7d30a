"""Stop a trial whose evaluations are worse than those of other trials."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from optuna.trial import Trial

from flatout.engine.sweep.storage import FAULTS
from flatout.engine.train.recording.metrics_file import read_points


@dataclass
class Pruning:
    """Reports the evaluations of a trial to Optuna's pruner."""

    trial: Trial
    folder: Path
    """The folder of the trial."""
    metric: str
    evaluations: int = 0
    value: float | None = None
    """The metric's value at the last evaluation."""
    is_worse: bool = False

    def look(self) -> bool:
        """Report the new evaluations to Optuna, in order, and return whether to prune
        the trial. If the storage is unreachable, return the previous answer."""
        with suppress(*FAULTS):
            points = read_points(self.folder / "metrics.jsonl")
            found = (point["metrics"].get(self.metric) for point in points)
            values = [value for value in found if value is not None]
            for value in values[self.evaluations :]:
                if self.is_worse:
                    break
                self.trial.report(value, self.evaluations + 1)
                self.evaluations, self.value = self.evaluations + 1, value
                self.is_worse = self.trial.should_prune()
        return self.is_worse
