"""Runs in MLflow that cost training nothing: a file first, the store behind it.

The engine appends a JSON line a log point. A thread of the Kedro process sends what is
new; what a dead, slow or locked store did not take waits beside the file, and
:func:`sync` sends it later.
"""

from typing import Any

from flatout.tracking.outbox import Outbox, RunRecord, begin
from flatout.tracking.store import close_stale_runs, one_line, prepare, use

_WITH_MLFLOW = ("Forwarder", "sync")
__all__ = [
    "Forwarder",
    "Outbox",
    "RunRecord",
    "begin",
    "close_stale_runs",
    "one_line",
    "prepare",
    "sync",
    "use",
]


def __getattr__(name: str) -> Any:
    """What imports MLflow, when it is asked for."""
    if name not in _WITH_MLFLOW:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flatout.tracking import forwarder

    return getattr(forwarder, name)
