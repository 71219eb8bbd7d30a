"""A sweep's queue in a file: a journal of Optuna, a JSON object a line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from flatout.engine.parameters import SettingsError

BEGIN = b'{"op_code":'
"""Of each line that Optuna writes."""


class Backend(JournalFileBackend):  # type: ignore[misc]
    """One that reads a line again where its bytes were no text: those of a network's
    disk may come as zeros at first. Optuna does so for broken JSON alone, and would
    go on behind that line."""

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        number = log_number_from
        try:
            for entry in super().read_logs(log_number_from):
                yield entry
                number += 1
        except UnicodeDecodeError:
            self._log_number_offset.pop(number + 1, None)
            raise


class MendingLock(JournalFileOpenLock):  # type: ignore[misc]
    """A writer that died in its line leaves a part of it, to which the next line would
    be glued: nobody could read the file any more."""

    def __init__(self, file: Path) -> None:
        super().__init__(str(file))
        self.file = file

    def acquire(self) -> bool:
        taken = bool(super().acquire())
        try:
            drop_torn_line(self.file)
        except BaseException:  # nobody else would release it
            self.release()
            raise
        return taken

    def release(self) -> None:
        """Without a fault where the lock's file is gone, with its folder or to another
        machine that waited for long: what happened to the line is known before."""
        with suppress(RuntimeError):
            super().release()


def open_journal(file: Path) -> Any:
    """Raises SettingsError where `file` is something else, which stays as it is, and
    OSError where this user may only read it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    check_journal(file)
    lock = MendingLock(file)
    try:
        storage = JournalStorage(Backend(str(file), lock))
    except (LookupError, TypeError, AssertionError) as error:
        raise _no_journal(file, repr(error)) from None
    lock.acquire()  # mends the last line, of what is a journal
    lock.release()
    return storage


def check_journal(file: Path) -> None:
    """Raises SettingsError at a line that is none of a journal. The last one may be
    torn."""
    if not file.exists():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            torn = not line.endswith(b"\n")
            if not (line.startswith(BEGIN) or number > 1 if torn else _is_entry(line)):
                raise _no_journal(file, f"line {number} is none of Optuna's")


def _is_entry(line: bytes) -> bool:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(entry, dict) and isinstance(entry.get("op_code"), int)


def _no_journal(file: Path, cause: str) -> SettingsError:
    return SettingsError(
        f"sweep.storage: {file} is not a journal of a sweep: name another file "
        f"({cause}). It is left as it was"
    )


def drop_torn_line(file: Path) -> None:
    """Cut what stands behind the last line's end."""
    with file.open("rb+") as journal:
        size = journal.seek(0, os.SEEK_END)
        if size == 0:
            return
        journal.seek(size - 1)
        if journal.read() == b"\n":
            return
        journal.seek(0)
        journal.truncate(journal.read().rfind(b"\n") + 1)
