"""Which process something belongs to, and whether that one still runs."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

import psutil
import xxhash


@cache
def process_space() -> str:
    """Where a process number means one process: containers of one name, and a machine
    before and after its start, count as several."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        marks = f"{boot.strip()}{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not Linux
        return platform.node()
    return f"{platform.node()}~{xxhash.xxh3_64_hexdigest(marks.encode())}"


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
