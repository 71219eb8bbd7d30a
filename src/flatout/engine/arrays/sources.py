"""Interface of all sources of raw samples."""

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

from flatout.engine.files.content_key import FILES, STATE, ContentKey, file_hash
from flatout.engine.machine.environment import usable_cores

logger = logging.getLogger(__name__)

WINDOW_ROWS = 8_192
"""Maximum number of rows that are read and checked at a time."""
WINDOW_BYTES = 2**26
"""Maximum total size of these rows."""


NO_VALUES = "a sample without values"


class ArraysError(ValueError):
    """Raw samples that cannot be used; the message names them and the remedy."""


@dataclass(frozen=True)
class Window:
    """Consecutive rows of a file."""

    source: str
    first_row: int
    values: npt.NDArray[Any]
    """(n, ...); any value for rows with an error."""
    labels: Sequence[Any] | None
    """(n,) in the form of the file."""
    faults: Mapping[int, str] = field(default_factory=dict)
    """Row of the window -> why it cannot be used."""
    names: Sequence[str] | None = None
    """(n,) file names of rows that are separate files."""
    files: Sequence[Path] | None = None
    """(n,) files whose bytes rows store instead of `values`."""

    def faults_for(self, shape: tuple[int, ...] | None) -> dict[int, str]:
        """Row -> why it is not a sample of `shape`; None: not known yet."""
        found, values = dict(self.faults), self.values
        if shape is not None and values.shape[1:] != shape:
            other = f"of shape {values.shape[1:]}, others are of {shape}"
            return {row: found.get(row, other) for row in range(len(values))}
        if not values[:1].size:
            return {row: found.get(row, NO_VALUES) for row in range(len(values))}
        if values.dtype.kind == "f":
            with np.errstate(over="ignore"):  # values beyond fp32 become infinite
                flat = values.reshape(len(values), -1).astype(np.float32, copy=False)
            for row in np.flatnonzero(~np.isfinite(flat).all(1)).tolist():
                why = "NaN" if np.isnan(flat[row]).any() else "an infinite value"
                found.setdefault(row, why)
        return found

    def place(self, row: int) -> tuple[str, int]:
        """File of a row of the window, and its number there."""
        if self.names is not None:
            return self.names[row], 0
        return self.source, self.first_row + row

    def name(self, row: int) -> str:
        """Name of a row in reports."""
        source, number = self.place(row)
        return source if self.names else f"{source}:{number}"


@dataclass(frozen=True)
class Files:
    """Files below `root`."""

    root: Path
    paths: Sequence[Path]

    @cached_property
    def state(self) -> str:
        """Hash of name, size, both times and inode of each file. It changes if a file
        is replaced, even by one of the same size and modification time."""
        stats = ((name_in(self.root, file), file.stat()) for file in self.paths)
        facts = [
            (name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino)
            for name, s in stats
        ]
        return ContentKey({"files": facts}).digest

    @cached_property
    def digest(self) -> str:
        """Hash of the name and the bytes of each file."""
        names = [name_in(self.root, file) for file in self.paths]
        with ThreadPoolExecutor(usable_cores()) as pool:
            digests = list(pool.map(_bytes_digest, self.paths))
        return ContentKey({"files": list(zip(names, digests, strict=True))}).digest


def _bytes_digest(file: Path) -> str:
    """Hash of a file; the error text if it cannot be read: its row is rejected."""
    try:
        return file_hash(file)
    except OSError as error:
        return str(error)


@dataclass(frozen=True)
class FilesKey(ContentKey):
    """Key of a result that was also made from `files`. Their bytes are not read if
    their sizes, times and inodes are unchanged."""

    files: Files

    def stored(self) -> dict[str, Any]:
        """See ContentKey.stored; reads the bytes of the files."""
        return {**self.fields, FILES: self.files.digest, STATE: self.files.state}

    def describes(self, stored: ContentKey) -> bool:
        """See ContentKey.describes."""
        same = stored.fields.get(STATE) == self.files.state
        digest = stored.fields.get(FILES) if same else self.files.digest
        return ContentKey({**self.fields, FILES: digest}).digest == stored.digest


class ArraySource(Protocol):
    """Raw samples, read again at each pass."""

    kind: ClassVar[str]
    """Value of `train.rows`."""

    @property
    def options(self) -> dict[str, Any]:
        """Parameters that determine how rows are read, by their path."""

    @property
    def files(self) -> Files:
        """All files that are read."""

    def facts(self) -> dict[str, Any]:
        """Facts for the report, after all rows were read."""

    def labels(self) -> Iterator[Any]:
        """Labels of all rows, without reading the samples; empty without labels."""

    def windows(self) -> Iterator[Window]:
        """All rows, in order. Raises ArraysError."""


def files_of(path: Path, endings: Sequence[str]) -> list[Path]:
    """Return the file, or files with these endings anywhere in a folder, by name.
    Raises ArraysError."""
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
    """Files anywhere in a folder, including linked folders; without hidden files and
    hidden folders, which contain thumbnails and checkpoints of notebooks. Raises
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
        yield from filter(Path.is_file, files)  # a link may be broken


def _raise(error: OSError) -> None:
    raise ArraysError(f"{error.filename} cannot be read: {error.strerror}") from error


def name_in(path: Path, file: Path) -> str:
    """Name of a file in messages."""
    return file.name if path == file else file.relative_to(path).as_posix()


def rows_between(total: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Bounds of the windows of `total` rows of `row_bytes`."""
    size = max(1, min(WINDOW_ROWS, WINDOW_BYTES // max(1, row_bytes)))
    for start in range(0, total, size):
        yield start, min(start + size, total)


def as_numbers(values: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """uint8 unchanged, other numbers as float32 if it represents them all, else
    float64; None if the values are not numbers."""
    if values.dtype == np.uint8:
        return values
    if values.dtype.kind not in "biuf":
        return None
    is_exact = np.can_cast(values.dtype, np.float32)
    return values.astype(np.float32 if is_exact else np.float64)
