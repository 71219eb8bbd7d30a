"""Where raw samples come from: what every kind of source gives."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from flatout.engine.data.raw_texts import RawTextsError
from flatout.engine.data.readers.file_reader import add_bytes
from flatout.engine.files.content_key import ContentKey
from flatout.engine.machine.environment import usable_cores

logger = logging.getLogger(__name__)

WINDOW_ROWS = 8_192
"""Rows that are read and checked at a time,"""
WINDOW_BYTES = 2**26
"""where they are no more than so many bytes together."""


NO_VALUES = "a sample without values"


class ArraysError(ValueError):
    """Raw samples that cannot be used; says which and what to do."""


@dataclass(frozen=True)
class Window:
    """Some rows of a file."""

    source: str
    first_row: int
    values: npt.NDArray[Any]
    """(n, ...); anything in the places of rows with a fault."""
    labels: Sequence[Any] | None
    """(n,) as the file has them."""
    faults: Mapping[int, str] = field(default_factory=dict)
    """Row of the window -> why it cannot be used."""
    names: Sequence[str] | None = None
    """(n,) of rows that are files of their own."""
    files: Sequence[Path] | None = None
    """(n,) whose bytes rows are to hold in place of `values`."""

    def faults_for(self, shape: tuple[int, ...] | None) -> dict[int, str]:
        """Row -> why it is no sample of `shape`; None: none is known yet."""
        found, values = dict(self.faults), self.values
        if shape is not None and values.shape[1:] != shape:
            other = f"of shape {values.shape[1:]}, others are of {shape}"
            return {row: found.get(row, other) for row in range(len(values))}
        if not values[:1].size:
            return {row: found.get(row, NO_VALUES) for row in range(len(values))}
        if values.dtype.kind == "f":
            with np.errstate(over="ignore"):  # what fp32 cannot hold is infinite
                flat = values.reshape(len(values), -1).astype(np.float32, copy=False)
            for row in np.flatnonzero(~np.isfinite(flat).all(1)).tolist():
                why = "NaN" if np.isnan(flat[row]).any() else "an infinite value"
                found.setdefault(row, why)
        return found

    def place(self, row: int) -> tuple[str, int]:
        """File, and row in it, of a row of the window."""
        if self.names is not None:
            return self.names[row], 0
        return self.source, self.first_row + row

    def name(self, row: int) -> str:
        """What people know a row by."""
        source, number = self.place(row)
        return source if self.names else f"{source}:{number}"


@dataclass(frozen=True)
class Files:
    """Files below `root`."""

    root: Path
    paths: Sequence[Path]

    @cached_property
    def state(self) -> str:
        """Of the name, the size, both times and the inode of each: another file in its
        place has not all of them, even if its size and time of change are the same."""
        stats = ((name_in(self.root, file), file.stat()) for file in self.paths)
        facts = [
            (name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino)
            for name, s in stats
        ]
        return ContentKey({"files": facts}).digest

    @cached_property
    def digest(self) -> str:
        """Of the name and the bytes of each."""
        names = [name_in(self.root, file) for file in self.paths]
        with ThreadPoolExecutor(usable_cores()) as pool:
            digests = list(pool.map(_bytes_digest, self.paths))
        return ContentKey({"files": list(zip(names, digests, strict=True))}).digest


def _bytes_digest(file: Path) -> str:
    """Of a file that may not be read its fault: its row is rejected."""
    state = xxhash.xxh3_128()
    try:
        add_bytes(state, file)
    except (OSError, RawTextsError) as error:
        return str(error)
    return str(state.hexdigest())


class ArraySource(Protocol):
    """Raw samples, read again at each pass."""

    kind: ClassVar[str]
    """As `train.rows` names it."""

    @property
    def options(self) -> dict[str, Any]:
        """Parameters that decide how rows are read, by their path."""

    @property
    def files(self) -> Files:
        """All that is read."""

    def told(self) -> dict[str, Any]:
        """For the report, once all was read."""

    def labels(self) -> Iterator[Any]:
        """Of all rows, without reading the samples; none where there are none."""

    def windows(self) -> Iterator[Window]:
        """All rows, in their order. Raises ArraysError."""


def files_of(path: Path, endings: Sequence[str]) -> list[Path]:
    """The file, or those of these endings anywhere in a folder, by name. Raises
    ArraysError."""
    if path.is_file():
        return [path]
    kinds = f"of a known kind ({', '.join(endings)})"
    if not path.is_dir():
        raise ArraysError(f"{path} is neither a folder nor a file {kinds}")
    files = sorted(f for f in files_below(path) if f.suffix.lower() in endings)
    if not files:
        raise ArraysError(f"{path} has no file {kinds}")
    return files


def files_below(path: Path) -> Iterator[Path]:
    """Files anywhere in a folder, also behind links to folders; none that is hidden or
    in a hidden folder, as thumbnails and checkpoints of notebooks are. Raises
    ArraysError."""
    seen = set()
    for folder, folders, names in os.walk(path, onerror=_raise, followlinks=True):
        place = Path(folder).resolve()
        if place in seen:
            logger.warning("%s leads to a folder that is read already", folder)
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files = (Path(folder, name) for name in names if not name.startswith("."))
        yield from filter(Path.is_file, files)  # a link may lead nowhere


def _raise(error: OSError) -> None:
    raise ArraysError(f"{error.filename} cannot be read: {error.strerror}") from error


def name_in(path: Path, file: Path) -> str:
    """Of a file, as people know it."""
    return file.name if path == file else file.relative_to(path).as_posix()


def rows_between(total: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Bounds of the windows of `total` rows of `row_bytes`."""
    size = max(1, min(WINDOW_ROWS, WINDOW_BYTES // max(1, row_bytes)))
    for start in range(0, total, size):
        yield start, min(start + size, total)


def as_numbers(values: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """uint8 as it is, other numbers as float32 if it holds them all, else as float64;
    None of what is no number."""
    if values.dtype == np.uint8:
        return values
    if values.dtype.kind not in "biuf":
        return None
    is_exact = np.can_cast(values.dtype, np.float32)
    return values.astype(np.float32 if is_exact else np.float64)
