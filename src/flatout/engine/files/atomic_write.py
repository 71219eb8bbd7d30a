"""Files and folders that appear whole under their name, or not at all.

They are written under a hidden name beside their place and renamed. What a killed
process left under such a name is removed when nothing was written to it for a day.

    .<name>.writing-<random>
    .<name>.replaced-<random>    what was there before, between two renames
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
REPLACE_ATTEMPTS = 3
ABANDONED_S = 86_400.0
"""Without a write for so long a hidden path counts as left behind."""


def child(folder: Path, name: Any) -> Path:
    """`folder/name` of a name that a file gives, which may be from anywhere. Raises
    ValueError where it is no plain name, or a link that leads out of `folder`."""
    plain = isinstance(name, str) and name not in ("", ".", "..")
    if plain and not set(name) & {"/", "\\", "\0"}:
        path = folder / str(name)
        if Path(os.path.realpath(path)).parent == Path(os.path.realpath(folder)):
            return path
    raise ValueError(f"{name!r} is not the name of something in {folder}")


def hidden_path(target: Path, use: str = WRITING) -> Path:
    """A new place beside `target`."""
    return target.with_name(f".{target.name}.{use}-{uuid.uuid4().hex}")


def replace_atomically(written: Path, target: Path) -> None:
    """Rename the folder `written` to `target`. What was there goes only after that,
    and comes back where it fails. Readers that mapped old files keep them."""
    for attempt in range(REPLACE_ATTEMPTS):
        old = hidden_path(target, REPLACED)
        with suppress(FileNotFoundError):  # another process moved it just now
            os.rename(target, old)
        try:
            os.rename(written, target)
            break
        except OSError:  # another process put its own there just now, or the disk fails
            if attempt == REPLACE_ATTEMPTS - 1:
                raise
        finally:
            _settle(old, target)
    sync(target.parent)


def _settle(old: Path, target: Path) -> None:
    """`old` is surplus beside `target`, and takes its place where there is none."""
    with suppress(OSError):
        if not os.path.lexists(target):
            os.rename(old, target)
            return
    if os.path.lexists(target):
        remove(old)


def write_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write files into a hidden folder and put it in `target`'s place.
    Whatever goes wrong, what was at `target` before is untouched."""
    hidden = hidden_path(target)
    try:
        hidden.mkdir(parents=True)
        fill(hidden)
        for path in hidden.iterdir():
            sync(path)
        sync(hidden)
        replace_atomically(hidden, target)
    except BaseException:
        remove(hidden)
        raise


def write_text(path: Path, text: str) -> None:
    """A file that is the old one or the new one, never a part."""
    write_file(path, lambda hidden: hidden.write_text(text, encoding="utf-8"))


def write_file(path: Path, fill: Callable[[Path], Any]) -> None:
    """The same of a file that `fill` writes."""
    hidden = hidden_path(path)
    try:
        fill(hidden)
        sync(hidden)
        os.replace(hidden, path)
    except BaseException:
        remove(hidden)
        raise
    sync(path.parent)


def remove(path: Path) -> None:
    """A file or folder that need not be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def sync(path: Path) -> None:
    """Bring a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def clear_leftovers(folder: Path, *, alone: bool = False) -> None:
    """Settle what killed processes left in `folder`, and say so in one line. `alone`:
    nobody else writes here now, so that the age does not count."""
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except OSError:
        return
    settled = set()
    for found in filter(None, map(HIDDEN.fullmatch, names)):
        path = folder / found.string
        if found["use"] == REPLACED:
            _settle(path, folder / found["name"])
        elif alone or time.time() - _written_s(path) > ABANDONED_S:
            remove(path)
        else:
            continue
        settled.add(found["name"])
    if settled:
        shown = ", ".join(sorted(settled))
        logger.info("%s: removed what killed runs left of %s", folder, shown)


def _written_s(path: Path) -> float:
    """When something below `path` was last written; now, where that is not known."""
    try:
        return max(p.lstat().st_mtime for p in (path, *path.rglob("*")))
    except OSError:
        return time.time()
