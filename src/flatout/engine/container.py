"""Limits that a container's control group sets, version 2 or 1."""

from __future__ import annotations

from pathlib import Path

CONTROL_GROUP = Path("/sys/fs/cgroup")
UNLIMITED_BYTES = 2**60
"""Version 1 says `no limit` with a number beyond it."""


def quota_cores(folder: Path = CONTROL_GROUP) -> float | None:
    """CPU time a second that is granted, in cores; None where unlimited."""
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
    """Memory that the container may take; None where unlimited."""
    text = _read(folder / "memory.max")
    if text is None:
        text = _read(folder / "memory" / "memory.limit_in_bytes")
    if text is None or not text.isdigit():
        return None
    return int(text) if int(text) < UNLIMITED_BYTES else None


def _read(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None
