"""The interface of raw sample sources, and code that the sources share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from flatout.engine.data.columns import cut_text
from flatout.engine.data.readers.file_reader import files_below
from flatout.engine.files.content_key import FILES, STATE, ContentKey, file_hash
from flatout.engine.machine.environment import usable_cores

WINDOW_ROWS = 8_192
"""Maximum number of rows to read and validate at a time."""
WINDOW_BYTES = 2**26
"""Maximum total size of the rows that are read at a time, in bytes."""


SHOWN_VALUES = 8
NO_VALUES = "a sample without values"


class ArraysError(ValueError):
    """Raised if raw samples cannot be used. The message suggests a fix."""


@dataclass(frozen=True)
class Window:
    """A window of n consecutive rows of a source."""

    source: str
    first_row: int
    values: npt.NDArray[Any]
    """The samples (n, ...). Unusable rows have arbitrary values."""
    labels: Sequence[Any] | None
    """The labels (n,) as read from the file."""
    faults: Mapping[int, str] = field(default_factory=dict)
    """A mapping from the index of each unusable row in the window to the reason."""
    names: Sequence[str] | None = None
    """File names (n,) if each row is a separate file."""
    files: Sequence[Path] | None = None
    """Files (n,) whose bytes are stored instead of `values`."""
    excerpts: Mapping[int, str] = field(default_factory=dict)
    """A mapping from the index of each unusable row of a table to its cells."""

    def faults_for(self, shape: tuple[int, ...] | None) -> dict[int, str]:
        """Return a mapping from the index of each invalid row to the reason. Samples
        must have the shape `shape`, unless it is None (not known yet)."""
        found, values = dict(self.faults), self.values
        if shape is not None and values.shape[1:] != shape:
            other = f"of shape {values.shape[1:]}, but others have shape {shape}"
            return {row: found.get(row, other) for row in range(len(values))}
        if not values[:1].size:
            return {row: found.get(row, NO_VALUES) for row in range(len(values))}
        if values.dtype.kind == "f":
            with np.errstate(over="ignore"):  # Values beyond float32 become infinite.
                flat = values.reshape(len(values), -1).astype(np.float32, copy=False)
            for row in np.flatnonzero(~np.isfinite(flat).all(1)).tolist():
                why = "NaN" if np.isnan(flat[row]).any() else "an infinite value"
                found.setdefault(row, why)
        return found

    def excerpt(self, row: int) -> str:
        """Return the cells, or the first values and the label, of a row that is not a
        separate file."""
        if self.names is not None or row in self.excerpts:
            return self.excerpts.get(row, "")
        label = [] if self.labels is None else [self.labels[row]]
        cells = [f"{value:g}" for value in self.values[row].ravel()[:SHOWN_VALUES]]
        return cut_text(", ".join([*cells, *map(str, label)]))

    def place(self, row: int) -> tuple[str, int]:
        """Return the file that contains a row, and the row's number in that file."""
        if self.names is not None:
            return self.names[row], 0
        return self.source, self.first_row + row

    def name(self, row: int) -> str:
        """Return the name of a row of the window, used in reports."""
        source, number = self.place(row)
        return source if self.names else f"{source}:{number}"


@dataclass(frozen=True)
class Files:
    """A list of files below the folder `root`."""

    root: Path
    paths: Sequence[Path]

    @cached_property
    def state(self) -> str:
        """Hash of the names, sizes, mtimes, ctimes and inodes of all files. The hash
        changes if a file is replaced, even by a file of the same size and mtime."""
        stats = ((name_in(self.root, file), file.stat()) for file in self.paths)
        facts = [
            (name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino)
            for name, s in stats
        ]
        return ContentKey({"files": facts}).digest

    @cached_property
    def digest(self) -> str:
        """Hash of the names and contents of all files."""
        names = [name_in(self.root, file) for file in self.paths]
        with ThreadPoolExecutor(usable_cores()) as pool:
            digests = list(pool.map(_bytes_digest, self.paths))
        return ContentKey({"files": list(zip(names, digests, strict=True))}).digest


def _bytes_digest(file: Path) -> str:
    """Return the hash of a file, or the error message if the file cannot be read. (The
    row of such a file is rejected later.)"""
    try:
        return file_hash(file)
    except OSError as error:
        return str(error)


@dataclass(frozen=True)
class FilesKey(ContentKey):
    """Content key of a result that also depends on the contents of `files`. To compare
    keys, the files are read only if their sizes, times or inodes have changed."""

    files: Files

    def stored(self) -> dict[str, Any]:
        """See ContentKey.stored. Reads the contents of the files."""
        return {**self.fields, FILES: self.files.digest, STATE: self.files.state}

    def describes(self, stored: ContentKey) -> bool:
        """See ContentKey.describes."""
        same = stored.fields.get(STATE) == self.files.state
        digest = stored.fields.get(FILES) if same else self.files.digest
        return ContentKey({**self.fields, FILES: digest}).digest == stored.digest


class ArraySource(Protocol):
    """A source of raw samples, which are read again on each pass."""

    kind: ClassVar[str]
    """The value of `train.rows` for these samples."""

    @property
    def options(self) -> dict[str, Any]:
        """The parameters that determine how rows are read, by parameter path."""

    @property
    def files(self) -> Files:
        """All files that the source reads."""

    def facts(self) -> dict[str, Any]:
        """Return entries for the split report. Call this after reading all rows."""

    def labels(self) -> Iterator[Any]:
        """Yield the labels of all rows, if any, without reading the samples."""

    def windows(self) -> Iterator[Window]:
        """Yield all rows, in order. Raises ArraysError if they cannot be read."""


def files_of(path: Path, endings: Sequence[str]) -> list[Path]:
    """Return `path` if it is a file, or all files below it with one of the `endings`,
    sorted. Raises ArraysError if there are none."""
    if path.is_file():
        return [path]
    kinds = f"of a known kind ({', '.join(endings)})"
    if not path.is_dir():
        raise ArraysError(f"{path} is neither a folder nor a file {kinds}")
    files = [f for f in files_below(path, (".",)) if f.suffix.lower() in endings]
    if not files:
        raise ArraysError(f"{path} has no file {kinds}")
    return files


def name_in(path: Path, file: Path) -> str:
    """Return the path of `file` relative to the folder `path`, or the name of `file` if
    both paths are equal."""
    return file.name if path == file else file.relative_to(path).as_posix()


def rows_between(total: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the start and stop of each window of `total` rows of size `row_bytes`."""
    size = max(1, min(WINDOW_ROWS, WINDOW_BYTES // max(1, row_bytes)))
    for start in range(0, total, size):
        yield start, min(start + size, total)


def as_numbers(values: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """Convert numbers to float32, or to float64 if float32 cannot represent their dtype
    exactly. uint8 arrays are returned unchanged. Return None if the values are not
    numbers."""
    if values.dtype == np.uint8:
        return values
    if values.dtype.kind not in "biuf":
        return None
    is_exact = np.can_cast(values.dtype, np.float32)
    return values.astype(np.float32 if is_exact else np.float64)
