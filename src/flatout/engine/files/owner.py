"""Identity of a process: its start time shows whether it still runs."""

from __future__ import annotations

import psutil


def runs_since(pid: int, begin_s: float) -> bool:
    """Return whether process `pid` started at `begin_s` (seconds since 1970): process
    ids are reused."""
    try:
        return abs(psutil.Process(pid).create_time() - begin_s) < 1
    except psutil.Error:
        return False
