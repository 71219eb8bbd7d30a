"""How far a training is, kept where even a kill at any moment leaves it.

A run that is killed before its first checkpoint leaves nothing to resume from. This
file lets the next start say so, instead of starting at step 1 in silence.
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
_LAYOUT = struct.Struct("=16sq")
"""Hash of the training's identity, steps done."""


class Unfinished:
    """The file of one training in its work folder, mapped: a step costs no call."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self._path = folder / NAME
        text = json.dumps(identity, sort_keys=True, default=str)
        self._key = xxhash.xxh3_128_digest(text.encode())
        self._map: Any = None

    def earlier_step(self) -> int | None:
        """Steps that a run of this very training had done when it ended without its
        result; None where there is no such run."""
        with suppress(OSError, struct.error):
            key, step = _LAYOUT.unpack(self._path.read_bytes())
            return int(step) if key == self._key else None
        return None

    def begin(self, step: int) -> None:
        with suppress(OSError):  # a full disk costs no run
            self._path.write_bytes(_LAYOUT.pack(self._key, step))
            with self._path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _LAYOUT.size)

    def note(self, step: int) -> None:
        if self._map is not None:
            self._map[:] = _LAYOUT.pack(self._key, step)

    def end(self) -> None:
        """The training has its result."""
        if self._map is not None:
            self._path.unlink(missing_ok=True)
