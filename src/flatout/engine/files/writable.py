"""Check whether this user can write to a path, by trying it.

For root without CAP_DAC_OVERRIDE, read-only mounts and network shares the permissions
of a file are not the answer.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR})
ELSEWHERE = "--params=data_dir=/another/disk"


def first_fault(paths: Iterable[Path]) -> str | None:
    """First of `paths` (which need not exist yet) that this user cannot write, as a
    message; None if all can be written. Disk space is not checked."""
    # A new file is renamed to its name: its folder must be writable, too.
    places = {_nearest(place) for path in paths for place in (path, path.parent)}
    for place in sorted(places):
        try:
            _try_to_write(place)
        except OSError as error:
            if error.errno in REFUSED:
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


def _try_to_write(place: Path) -> None:
    """Open for writing and leave the place unchanged."""
    if place.is_file():
        with place.open("ab"):
            return
    with tempfile.TemporaryFile(dir=place):
        return
