"""Who looks on while a sweep runs."""

from __future__ import annotations

from typing import Protocol

from flatout.engine.bench.trial_spec import TrialResult


class Watcher(Protocol):
    """Sees a sweep while it runs."""

    def expect(self, trials: int) -> None:
        """So many trials are planned in all."""

    def expect_more(self, trials: int) -> None:
        """So many that no plan could know."""

    def begins(self, trial: TrialResult) -> None: ...

    def ends(self, trial: TrialResult) -> None: ...


class Unwatched:
    """Nobody looks."""

    def expect(self, trials: int) -> None: ...

    def expect_more(self, trials: int) -> None: ...

    def begins(self, trial: TrialResult) -> None: ...

    def ends(self, trial: TrialResult) -> None: ...
