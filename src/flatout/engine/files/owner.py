"""Which process something belongs to, and whether that one still runs."""

from __future__ import annotations

from pathlib import Path

import psutil


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since the machine did, which no change
    of the clock moves; None where that cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def runs_since(pid: int, begin_s: float) -> bool:
    """Whether the process of this number began then, in seconds since 1970: a number is
    given again."""
    try:
        return abs(psutil.Process(pid).create_time() - begin_s) < 1
    except psutil.Error:
        return False
