"""What the readers of the kinds of file share."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from flatout.engine.data.raw_texts import RawBatch, RawTextsError
from flatout.engine.parameters.faults import first_line

HASH_BYTES = 16 << 20


@dataclass(frozen=True)
class Format:
    """How the text of CSV and JSON files is written."""

    encoding: str = "utf-8"
    delimiter: str = ","
    quote_char: str | None = '"'

    @property
    def arrow_encoding(self) -> str:
        name = codecs.lookup(self.encoding).name
        return "utf8" if name in ("utf-8", "utf-8-sig") else name


class FileReader(ABC):
    """Reads one file. `source` is its name in reports."""

    def __init__(self, path: Path, source: str, form: Format) -> None:
        self.path, self.source, self.form = path, source, form

    @abstractmethod
    def column_names(self) -> list[str]: ...

    @abstractmethod
    def batches(self, columns: list[str]) -> Iterator[RawBatch]: ...

    def line_numbers(self) -> Iterator[int] | None:
        """Line of the file, from 1, of each row in turn; None where it has no lines."""
        return None

    def open(self) -> Any:
        """The bytes, unpacked where the suffix says so."""
        return pa.input_stream(str(self.path), compression="detect")

    def bad_encoding(self) -> RawTextsError:
        """Bytes that are not of the file's encoding, with their place."""
        offset, line, byte = _first_bad_byte(self)
        # Windows has quotes and dashes where latin-1 has control characters.
        likely = "cp1252" if 0x80 <= byte < 0xA0 else "latin-1"
        return RawTextsError(
            f"{self.path} is not {self.form.encoding}: byte 0x{byte:02x} at offset "
            f"{offset}, line {line}. Name the file's encoding in the catalog, as in "
            f"encoding: {likely} (or cp949, utf-16)"
        )

    def fail(self, error: Exception, advice: str) -> RawTextsError:
        why = first_line(error)
        return RawTextsError(f"{self.path} cannot be read ({why}): {advice}")


def files_of(path: Path) -> list[Path]:
    """`path`, or all files below it, sorted. Raises RawTextsError."""
    with readable(path):
        if not path.is_dir():
            path.stat()
            return [path]
        list(path.iterdir())  # rglob passes over folders it may not read
        return sorted(p for p in path.rglob("*") if p.is_file())


def add_bytes(state: Any, file: Path) -> None:
    """Those of `file`, to a hash."""
    with readable(file), file.open("rb") as stream:
        while block := stream.read(HASH_BYTES):
            state.update(block)


def _first_bad_byte(reader: FileReader) -> tuple[int, int, int]:
    """Offset, line (from 1) and value of the first byte that cannot be decoded."""
    decoder = codecs.getincrementaldecoder(reader.form.encoding)()
    offset, line = 0, 1
    with reader.open() as stream:
        while block := stream.read(1 << 20):
            pending = decoder.getstate()[0]
            try:
                decoder.decode(block)
            except UnicodeDecodeError as error:
                data = pending + block
                line += data[: error.start].count(b"\n")
                return offset - len(pending) + error.start, line, data[error.start]
            offset += len(block)
            line += block.count(b"\n")
    return offset, line, 0


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Errors of reading a file, with its name and what to do."""
    try:
        yield
    except FileNotFoundError as error:
        raise RawTextsError(
            f"{path} is not there: set its filepath in the catalog (relative paths "
            "start at the project's folder)"
        ) from error
    except PermissionError as error:
        raise RawTextsError(
            f"{error.filename or path} may not be read: give this user the right to "
            "(chmod +r; folders also +x)"
        ) from error
