"""Check whether this user can write to a path."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

ELSEWHERE = "--params=data_dir=/another/disk"


def first_fault(paths: Iterable[Path]) -> str | None:
    """First of `paths` (which need not exist yet) that this user cannot write, as a
    message; None if all can be written. Disk space is not checked."""
    # A new file is renamed to its name: its folder must be writable, too.
    places = {_nearest(place) for path in paths for place in (path, path.parent)}
    for place in sorted(places):
        # Asks the kernel, which also knows capabilities and read-only mounts.
        if not os.access(place, os.W_OK):
            return f"{shown(place)} cannot be written by this user"
    return None


def shown(place: Path) -> str:
    """Path relative to the working directory, with a slash after a folder."""
    inside = place.is_relative_to(Path.cwd()) and place != Path.cwd()
    text = str(place.relative_to(Path.cwd()) if inside else place)
    return f"{text}/" if os.path.isdir(place) else text


def _nearest(path: Path) -> Path:
    """`path` or its nearest parent that exists."""
    whole = path.absolute()
    return next(place for place in (whole, *whole.parents) if os.path.lexists(place))
