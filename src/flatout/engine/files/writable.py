"""Check whether the current user can write to a path."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

ELSEWHERE = "--params=data_dir=/another/disk"


def first_fault(paths: Iterable[Path]) -> str | None:
    """Return a message about the first of `paths`, which need not exist, that the user
    cannot write to, or None. Disk space is not checked."""
    # A new file is written under another name first, so its folder must be writable.
    places = {_nearest(place) for path in paths for place in (path, path.parent)}
    for place in sorted(places):
        # os.access asks the kernel, which knows capabilities and read-only mounts.
        if not os.access(place, os.W_OK):
            return f"{shown(place)} cannot be written by this user"
    return None


def shown(place: Path) -> str:
    """Return a path as text for messages. Paths in the working directory are relative
    to it, and the paths of folders end with a slash."""
    inside = place.is_relative_to(Path.cwd()) and place != Path.cwd()
    text = str(place.relative_to(Path.cwd()) if inside else place)
    return f"{text.rstrip('/')}/" if os.path.isdir(place) else text


def _nearest(path: Path) -> Path:
    """Return `path` or its nearest parent that exists."""
    whole = path.absolute()
    return next(place for place in (whole, *whole.parents) if os.path.lexists(place))
