"""Identity of a process: its start time shows whether it still runs."""

from __future__ import annotations

from pathlib import Path

import psutil


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, which clock changes do not
    move; None if it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def runs_since(pid: int, begin_s: float) -> bool:
    """Return whether process `pid` started at `begin_s` (seconds since 1970): process
    ids are reused."""
    try:
        return abs(psutil.Process(pid).create_time() - begin_s) < 1
    except psutil.Error:
        return False
