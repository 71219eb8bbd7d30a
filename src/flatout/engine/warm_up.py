"""What is put off until a training of this process has done its first steps.

Work in Python (opening a tracking store takes 1.5 s of it) would hold up those steps
beside them, and the first step is what tells that a run goes on. So it is done between
warm-up and the first measured step, where it is in no rate.
"""

from __future__ import annotations

from collections.abc import Callable

Action = Callable[[], object]


class WarmUp:
    """Holds at most one action."""

    def __init__(self) -> None:
        self._action: Action | None = None

    def put_off(self, action: Action | None) -> None:
        """None: nothing any more."""
        self._action = action

    def ends(self) -> None:
        """Called by the training; does the action once."""
        action, self._action = self._action, None
        if action is not None:
            action()


warm_up = WarmUp()
