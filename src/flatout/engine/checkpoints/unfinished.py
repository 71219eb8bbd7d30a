"""How far a training is, kept where even a kill at any moment leaves it.

A run that is killed before its first checkpoint leaves nothing to resume from. This
file lets the next start say so, instead of starting at step 1 in silence. It also
holds the step from which steps are compiled, before that step runs.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

NAME = "unfinished"
_LAYOUT = struct.Struct("=16sqq")
"""Hash of the training's identity, steps done, first compiled step."""
_UNKNOWN = -1


class Unfinished:
    """The file of one training in its work folder, mapped: a step costs no call."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self._path = folder / NAME
        text = json.dumps(identity, sort_keys=True, default=str)
        self._key = xxhash.xxh3_128_digest(text.encode())
        self._map: Any = None
        self._compiled_from = _UNKNOWN

    def earlier_step(self) -> int | None:
        """Steps that a run of this very training had done when it ended without its
        result; None where there is no such run."""
        found = self._read()
        return found and found[0]

    def compiled_from(self) -> int | None:
        """The step from which that run is compiled; None where it was not known."""
        found = self._read()
        return found[1] if found and found[1] != _UNKNOWN else None

    def _read(self) -> tuple[int, int] | None:
        with suppress(OSError, struct.error):
            key, *steps = _LAYOUT.unpack(self._path.read_bytes())
            return (int(steps[0]), int(steps[1])) if key == self._key else None
        return None

    def begin(self, step: int, compiled_from: int | None = None) -> None:
        self._compiled_from = _UNKNOWN if compiled_from is None else compiled_from
        with suppress(OSError):  # a full disk costs no run
            # In place where there is one: a disk that is full would leave it empty.
            if not self._has_its_size():
                self._path.write_bytes(self._content(step))
            with self._path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _LAYOUT.size)
            self.note(step)

    def _has_its_size(self) -> bool:
        return self._path.exists() and self._path.stat().st_size == _LAYOUT.size

    def note(self, step: int) -> None:
        if self._map is not None:
            self._map[:] = self._content(step)

    def note_compiled_from(self, step: int) -> None:
        """Steps from `step` on, none of which has run, are compiled: kept on the disk
        when this returns, if the disk takes it."""
        self._compiled_from = step
        self.note(step)
        with suppress(OSError):
            if self._map is not None:
                self._map.flush()

    def _content(self, step: int) -> bytes:
        return _LAYOUT.pack(self._key, step, self._compiled_from)

    def end(self) -> None:
        """The training has its result."""
        if self._map is not None:
            self._path.unlink(missing_ok=True)
