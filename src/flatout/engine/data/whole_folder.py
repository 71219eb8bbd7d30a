"""Folders that are whole or absent, with the key of what they hold.

What is written goes into a folder beside the target, which takes the target's place
only when every file is on the disk and the key file, written last, is too.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from flatout.engine.data.content_key import ContentKey

KEY_FILE = "flatout_key.json"
REPLACE_ATTEMPTS = 3


class StorageError(OSError):
    """The disk would not take the data; says what was kept and what to do."""


def is_current(folder: Path, key: ContentKey) -> bool:
    """Whether `folder` holds, complete, what `key` describes."""
    stored = _read_key_file(folder)
    if stored is None or stored["digest"] != key.digest:
        return False
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == size
        for name, size in stored["files"].items()
    )


def stored_key(folder: Path) -> ContentKey | None:
    """The key that `folder` was written with; None where there is none."""
    stored = _read_key_file(folder)
    return None if stored is None else ContentKey(stored["fields"])


def stored_facts(folder: Path) -> dict[str, Any]:
    """What the recipe counted while it was carried out."""
    stored = _read_key_file(folder)
    return {} if stored is None else dict(stored.get("facts", {}))


def _read_key_file(folder: Path) -> dict[str, Any] | None:
    try:
        stored = json.loads((folder / KEY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stored if {"digest", "fields", "files"} <= set(stored) else None


def write_whole(
    folder: Path, key: ContentKey, fill: Callable[[Path], dict[str, Any]]
) -> None:
    """Let `fill` write files into a new folder, then put it in `folder`'s place. What
    `fill` returns is kept beside the key.

    Raises StorageError where the disk is full or not writable; what `folder` held
    before is untouched then.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    mark = f"{platform.node()}-{os.getpid()}-{uuid.uuid4().hex}"
    target = folder.with_name(f".{folder.name}.writing-{mark}")
    try:
        target.mkdir()
        facts = fill(target)
        _write_key_file(target, key, facts)
        _replace(folder, target)
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise _storage_error(folder, error) from error
        raise


def _sweep(folder: Path) -> None:
    """Remove what killed processes of this machine left half-written."""
    for rest in folder.parent.glob(f".{folder.name}.writing-{platform.node()}-*"):
        if not _is_alive(int(rest.name.rsplit("-", 2)[1])):
            shutil.rmtree(rest, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _write_key_file(folder: Path, key: ContentKey, facts: dict[str, Any]) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    for name in files:
        _sync(folder / name)
    record = {
        "digest": key.digest,
        "fields": dict(key.fields),
        "facts": facts,
        "files": files,
    }
    text = json.dumps(record, indent=2, ensure_ascii=False)
    (folder / KEY_FILE).write_text(text, encoding="utf-8")
    _sync(folder / KEY_FILE)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(folder: Path, target: Path) -> None:
    """Put `target` in the place of `folder`. Readers that mapped the old files keep
    them; a crash between the two renames leaves no folder, never a mixed one."""
    for attempt in range(REPLACE_ATTEMPTS):
        old = target.with_name(f"{target.name}.old{attempt}")
        with suppress(FileNotFoundError):  # another process moved it just now
            os.rename(folder, old)
        try:
            os.rename(target, folder)
            break
        except OSError:  # another process put its own there just now
            if attempt == REPLACE_ATTEMPTS - 1:
                raise
        finally:
            shutil.rmtree(old, ignore_errors=True)
    _sync(folder.parent)


def _storage_error(folder: Path, error: OSError) -> StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        cause = "the disk is full (or a limit on file size was met)"
    else:
        cause = str(error)
    return StorageError(
        f"{folder} could not be written: {cause}. Nothing was changed there. Free "
        "space, or keep the data elsewhere with --params=data_dir=/another/disk"
    )
