"""Code shared by the readers of all file types."""

from __future__ import annotations

import codecs
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from flatout.engine.data.raw_texts import RawBatch, RawTextsError
from flatout.engine.parameters.faults import first_line

logger = logging.getLogger(__name__)

PACKED = {"gzip": b"\x1f\x8b", "bz2": b"BZh", "zstd": b"\x28\xb5\x2f\xfd"}
"""The first bytes of compressed files, by compression format."""
CHECKED_BYTES = 1 << 20


@dataclass(frozen=True)
class Format:
    """Options for reading CSV and JSON files."""

    encoding: str = "utf-8"
    delimiter: str = ","
    quote_char: str | None = '"'
    column_names: tuple[str, ...] | None = None
    """Column names of a CSV file without a header."""
    kind: str | None = None
    """File type, such as `csv` or `jsonl`. If None, the file name's suffix is used."""

    def __post_init__(self) -> None:
        """Raise RawTextsError if a value is invalid."""
        try:
            "a".encode(self.encoding)
        except (LookupError, TypeError) as error:
            raise RawTextsError(
                f"encoding: {self.encoding!r} is unknown. Examples are utf-8, latin-1, "
                "cp949, utf-16, ..."
            ) from error
        if not _is_one_mark(self.delimiter):
            raise RawTextsError(
                f"delimiter: {self.delimiter!r} is not one ASCII character between "
                'columns, such as ",", ";", "|" or "\\t" (a tab, in double quotes)'
            )
        if self.quote_char and not _is_one_mark(self.quote_char):
            raise RawTextsError(
                f"quote_char: {self.quote_char!r} is not one ASCII character; null: "
                "quotes are part of the texts"
            )


def _is_one_mark(value: Any) -> bool:
    one = isinstance(value, str) and len(value) == 1 and value.isascii()
    return one and value not in "\r\n"


class Utf8:
    """A stream that is converted from `encoding` to UTF-8. `marks` is the number of
    times that the text `mark` has occurred in the stream so far. If `as_is` is True,
    the bytes are not changed and nothing is counted."""

    def __init__(self, stream: Any, encoding: str, mark: str, *, as_is: bool) -> None:
        self.marks = 0
        self._mark, self._as_is = mark, as_is
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self.stream = pa.TransformInputStream(stream, self._decoded)

    def _decoded(self, block: Any) -> bytes:
        data = bytes(block)
        if self._as_is:
            return data
        text = self._decoder.decode(data, final=not data)
        self.marks += text.count(self._mark) if self._mark else 0
        return text.encode(errors="replace")


class FileReader(ABC):
    """Base class of readers, each of which reads a single file. `source` is the name of
    the file in reports."""

    def __init__(self, path: Path, source: str, form: Format) -> None:
        self.path, self.source, self.form = path, source, form

    @abstractmethod
    def column_names(self) -> list[str]: ...

    @abstractmethod
    def batches(self, columns: list[str]) -> Iterator[RawBatch]: ...

    def utf8(self, mark: str = "", *, keep_bad: bool = False) -> Utf8:
        """Open the file as a stream of UTF-8. If `keep_bad` is True, invalid bytes in a
        UTF-8 file are kept. Otherwise, reading them raises an error."""
        encoding = codecs.lookup(self.form.encoding).name
        as_is = keep_bad and encoding in ("utf-8", "utf-8-sig")
        encoding = "utf-8-sig" if encoding == "utf-8" else encoding
        return Utf8(self._open(), encoding, mark, as_is=as_is)

    def is_misread(self) -> bool:
        """Return whether the file is UTF-8 with characters that are not ASCII, although
        another encoding is set, which would replace these characters."""
        if codecs.lookup(self.form.encoding).name.startswith("utf"):
            return False
        decoder, found = codecs.getincrementaldecoder("utf-8")(), False
        with suppress(ValueError, OSError), self._open() as stream:
            while block := stream.read(CHECKED_BYTES):
                found |= not decoder.decode(block).isascii()
            decoder.decode(b"", final=True)
            return found
        return False

    def _open(self) -> Any:
        """Open the file, and decompress it if it is compressed (see PACKED)."""
        with self.path.open("rb") as file:
            head = file.read(4)
        packed = next((k for k, mark in PACKED.items() if head.startswith(mark)), None)
        return pa.input_stream(str(self.path), compression=packed)

    @contextmanager
    def errors(self, advice: str) -> Iterator[None]:
        """Context manager that adds the file name and `advice` to parsing errors."""
        try:
            yield
        except (FileNotFoundError, PermissionError, RawTextsError):
            raise
        except UnicodeError as error:
            raise self._bad_encoding(error) from error
        except (pa.ArrowException, OSError) as error:
            raise self.fail(error, advice) from error

    def _bad_encoding(self, error: UnicodeError) -> RawTextsError:
        shown = ""
        if isinstance(error, UnicodeDecodeError):
            shown = f" (byte 0x{error.object[error.start]:02x})"
        return RawTextsError(
            f"{self.path} is not {self.form.encoding}{shown}. Save it as UTF-8. "
            "For texts, the file's encoding can be named in the catalog instead, for "
            "example encoding: cp1252 (or latin-1, cp949, utf-16, utf-8)"
        )

    def fail(self, error: Exception, advice: str) -> RawTextsError:
        why = first_line(error)
        return RawTextsError(f"{self.path} cannot be read ({why}): {advice}")


HIDDEN = (".", "_")
"""The first characters of the names of files that contain no texts, like `_SUCCESS`."""


def files_below(path: Path, hidden: tuple[str, ...] = HIDDEN) -> list[Path]:
    """Return `path` if it is a file, or else all files below it, sorted by path. Links
    to folders are followed. Files and folders whose names start with one of `hidden`
    are left out. Raises RawTextsError if `path` cannot be read."""
    with readable(path):
        if not path.is_dir():
            path.stat()
            return [path]
        found, seen = [], set()
        for folder, folders, names in os.walk(path, onerror=_raise, followlinks=True):
            place = Path(folder).resolve()
            if place in seen:
                logger.warning("%s leads to a folder that is read already", folder)
                folders.clear()
                continue
            seen.add(place)
            folders[:] = sorted(n for n in folders if not n.startswith(hidden))
            found += [Path(folder, n) for n in names if not n.startswith(hidden)]
    return sorted(filter(Path.is_file, found))  # without broken links


def _raise(error: OSError) -> None:
    raise error


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Context manager that turns FileNotFoundError and PermissionError into a
    RawTextsError. The message contains `path` and suggests a fix."""
    try:
        yield
    except FileNotFoundError as error:
        raise RawTextsError(
            f"{path} is not there: correct the path in the command or in the catalog "
            "(relative paths start at the project's folder)"
        ) from error
    except PermissionError as error:
        raise RawTextsError(
            f"{error.filename or path} cannot be read: give this user permission "
            "(chmod +r; folders also +x)"
        ) from error
