"""Whether this user can write somewhere: tried, because rights alone do not say it.

Root without CAP_DAC_OVERRIDE, read-only mounts and network shares differ from what the
permissions of a file promise.
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
    """Of files and folders that need not exist yet: what cannot be written. A full disk
    is another matter."""
    # A new file is renamed to its name: its folder must take it, too.
    places = {_nearest(place) for path in paths for place in (path, path.parent)}
    for place in sorted(places):
        try:
            _try_to_write(place)
        except OSError as error:
            if error.errno in REFUSED:
                return f"{shown(place)} cannot be written by this user"
    return None


def shown(place: Path) -> str:
    """`data/` of a folder below the working directory."""
    inside = place.is_relative_to(Path.cwd()) and place != Path.cwd()
    text = str(place.relative_to(Path.cwd()) if inside else place)
    return f"{text}/" if os.path.isdir(place) else text


def _nearest(path: Path) -> Path:
    """`path`, or what is there of the folders above it."""
    whole = path.absolute()
    return next(place for place in (whole, *whole.parents) if os.path.lexists(place))


def _try_to_write(place: Path) -> None:
    """Leaves nothing behind."""
    if place.is_file():
        with place.open("ab"):
            return
    with tempfile.TemporaryFile(dir=place):
        return
