"""Progress of a training, in a file that survives a kill at any moment.

A run that is killed before its first checkpoint cannot be resumed. With this file the
next start can report that, instead of silently starting at step 1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

NAME = "unfinished"


class Unfinished:
    """A file in the work folder with the training's key and the number of steps done.
    It stays open: noting a step is one write."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self._path = folder / NAME
        text = json.dumps(identity, sort_keys=True, default=str)
        self._key = xxhash.xxh3_128_hexdigest(text.encode())
        self._file: int | None = None

    def earlier_step(self) -> int | None:
        """Steps done by an earlier run of the same training that ended without a
        result; None if there is no such run."""
        with suppress(OSError, ValueError):
            key, step = self._path.read_text().split()
            return int(step) if key == self._key else None
        return None

    def begin(self, step: int) -> None:
        """Note steps from here on; a full disk does not stop the run."""
        with suppress(OSError):
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self.note(step)

    def note(self, step: int) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.pwrite(self._file, f"{self._key} {step:20d}".encode(), 0)

    def close(self, *, finished: bool) -> None:
        """Close the file; it is removed if the training is `finished`."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            if finished:
                self._path.unlink(missing_ok=True)
