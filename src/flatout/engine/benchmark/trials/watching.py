"""Who looks on while a benchmark runs."""

from __future__ import annotations

from flatout.engine.benchmark.trials.trial_spec import TrialResult


class Watcher:
    """Sees a benchmark while it runs; this one looks away."""

    def expect(self, trials: int) -> None:
        """So many trials are planned in all."""

    def expect_more(self, trials: int) -> None:
        """So many that no plan could know."""

    def ends(self, trial: TrialResult) -> None: ...
