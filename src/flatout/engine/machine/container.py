"""Read the limits that a container's control group (version 1 or 2) sets."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

CONTROL_GROUP = Path("/sys/fs/cgroup")
UNLIMITED_BYTES = 2**60
"""Control groups of version 1 express "no limit" as a number larger than this."""


def quota_cores(folder: Path = CONTROL_GROUP) -> float | None:
    """Return the CPU quota in cores (CPU seconds per second), or None if unlimited."""
    text = _read(folder / "cpu.max")
    if text is None:
        quota = _read(folder / "cpu" / "cpu.cfs_quota_us")
        period = _read(folder / "cpu" / "cpu.cfs_period_us")
    else:
        quota, _, period = text.partition(" ")
    try:
        cores = int(quota or "") / int(period or "")
    except (ValueError, ZeroDivisionError):  # `max`, or no such file
        return None
    return cores if cores > 0 else None


def memory_limit_bytes(folder: Path = CONTROL_GROUP) -> int | None:
    """Return the container's memory limit in bytes, or None if unlimited."""
    text = _read(folder / "memory.max", folder / "memory/memory.limit_in_bytes")
    if text is None or not text.isdigit():
        return None
    return int(text) if int(text) < UNLIMITED_BYTES else None


def memory_used_bytes(folder: Path = CONTROL_GROUP) -> int:
    """Return how many bytes of memory the container uses. The inactive file cache is
    not counted, because the kernel can reclaim it."""
    used = _read(folder / "memory.current", folder / "memory/memory.usage_in_bytes")
    counts = _read(folder / "memory.stat", folder / "memory/memory.stat")
    kept = dict(line.split() for line in (counts or "").splitlines())
    files = kept.get("total_inactive_file", kept.get("inactive_file", "0"))
    return max(0, int(used or 0) - int(files))


def total_memory_bytes() -> int:
    """Return the machine's memory in bytes, or the container's limit if it is lower."""
    limit = memory_limit_bytes()
    return min(psutil.virtual_memory().total, limit or UNLIMITED_BYTES)


def available_memory_bytes() -> int:
    """Return the bytes that can still be allocated without swapping or being killed."""
    free = int(psutil.virtual_memory().available)
    limit = memory_limit_bytes()
    return free if limit is None else min(free, limit - memory_used_bytes())


def _read(*files: Path) -> str | None:
    """Return the text of the first of `files` that exists."""
    for file in files:
        with suppress(OSError):
            return file.read_text().strip()
    return None
