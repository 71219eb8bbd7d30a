"""Write files and folders that appear under their name only once they are complete.

New contents are written under a hidden name in the same folder, which is then renamed.
Hidden files that a killed process left behind are removed after a day without a write.

    .<name>.writing-<random>
    .<name>.replaced-<random>    the previous contents, between two renames
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

WRITING, REPLACED = "writing", "replaced"
HIDDEN = re.compile(rf"\.(?P<name>.+)\.(?P<use>{WRITING}|{REPLACED})-.+")
ABANDONED_S = 86_400.0
"""A hidden path that has not been written to for this many seconds is abandoned."""


def child(folder: Path, name: Any) -> Path:
    """Return `folder` / `name`, after checking a `name` that was read from an untrusted
    file. Raises ValueError if `name` is not a plain file name, or if the path is a link
    that leads out of `folder`."""
    plain = isinstance(name, str) and name not in ("", ".", "..")
    if plain and not set(name) & {"/", "\\", "\0"}:
        path = folder / str(name)
        if Path(os.path.realpath(path)).parent == Path(os.path.realpath(folder)):
            return path
    raise ValueError(f"{name!r} is not the name of something in {folder}")


def hidden_path(target: Path, use: str = WRITING) -> Path:
    """Return a new hidden path in the folder of `target`. Its name contains `use`,
    which is WRITING or REPLACED."""
    return target.with_name(f".{target.name}.{use}-{uuid.uuid4().hex}")


def replace_atomically(written: Path, target: Path) -> None:
    """Rename the folder `written` to `target`. A previous folder `target` is removed
    afterwards, or restored if renaming fails. Processes that have mapped its files can
    still read them."""
    old = hidden_path(target, REPLACED)
    with suppress(FileNotFoundError):
        os.rename(target, old)
    try:
        os.rename(written, target)
    finally:
        _settle(old, target)
    sync(target.parent)


def _settle(old: Path, target: Path) -> None:
    """Remove `old` if `target` exists, otherwise rename `old` to `target`."""
    with suppress(OSError):
        if not os.path.lexists(target):
            os.rename(old, target)
            return
    if os.path.lexists(target):
        remove(old)


def write_folder(target: Path, fill: Callable[[Path], Any]) -> None:
    """Let `fill` write files into a hidden folder, then rename this folder to `target`.
    If anything fails, the previous `target` is unchanged."""
    hidden = hidden_path(target)
    try:
        hidden.mkdir(parents=True)
        fill(hidden)
        for path in hidden.rglob("*"):
            sync(path)
        sync(hidden)
        replace_atomically(hidden, target)
    except BaseException:
        remove(hidden)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically: readers see either the old or the new file."""
    write_file(path, lambda hidden: hidden.write_text(text, encoding="utf-8"))


def write_file(path: Path, fill: Callable[[Path], Any]) -> None:
    """Write a file atomically. `fill` receives a temporary path and writes the file
    there. Missing parent folders are created."""
    hidden = hidden_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        fill(hidden)
        sync(hidden)
        os.replace(hidden, path)
    except BaseException:
        remove(hidden)
        raise
    sync(path.parent)


def remove(path: Path) -> None:
    """Remove a file or folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def clear_leftovers(folder: Path, *, alone: bool = False) -> None:
    """Remove hidden files that killed processes left in `folder`, and log their names.
    Only abandoned files (see ABANDONED_S) are removed, unless `alone` states that no
    other process writes to `folder`."""
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except OSError:
        return
    settled = set()
    for found in filter(None, map(HIDDEN.fullmatch, names)):
        path = folder / found.string
        if found["use"] == REPLACED:
            _settle(path, folder / found["name"])
        elif alone or _age_s(path) > ABANDONED_S:
            remove(path)
        else:
            continue
        settled.add(found["name"])
    if settled:
        shown = ", ".join(sorted(settled))
        logger.info("%s: removed unfinished files of killed runs: %s", folder, shown)


def _age_s(path: Path) -> float:
    """Return the seconds since the last write, or 0 if `path` no longer exists."""
    with suppress(OSError):
        return time.time() - max(p.lstat().st_mtime for p in (path, *path.rglob("*")))
    return 0.0
