"""Stream rows of CSV, JSON Lines, Parquet and Arrow files of any size."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from flatout.engine.data.raw_texts import RawBatch, RawTextsError
from flatout.engine.data.readers.columnar_reader import ArrowReader, ParquetReader
from flatout.engine.data.readers.csv_reader import CsvReader
from flatout.engine.data.readers.file_reader import (
    FileReader,
    Format,
    files_below,
    readable,
)
from flatout.engine.data.readers.json_reader import JsonReader
from flatout.engine.files.content_key import files_hash

logger = logging.getLogger(__name__)

READERS: dict[str, type[FileReader]] = {
    ".csv": CsvReader,
    ".tsv": CsvReader,
    ".jsonl": JsonReader,
    ".ndjson": JsonReader,
    ".json": JsonReader,
    ".parquet": ParquetReader,
    ".arrow": ArrowReader,
    ".feather": ArrowReader,
}
SHEETS = (".xlsx", ".xls", ".ods")
PACKED = (".gz", ".bz2", ".zst")
"""Suffixes of compressed CSV and JSON files."""


@dataclass(frozen=True)
class TextFiles:
    """A text file, or a folder of shards of the same file type."""

    path: Path
    form: Format = field(default_factory=Format)

    @cached_property
    def files(self) -> list[Path]:
        """The shards, sorted by name. Raises RawTextsError if there are none, or if
        their file types differ."""
        inside = files_below(self.path)
        if not self.path.is_dir():
            return inside
        if {"state.json", "dataset_info.json"} <= {p.name for p in inside}:
            raise RawTextsError(
                f"{self.path} is a folder of datasets.save_to_disk: name it in an "
                "entry of type huggingface.ArrowDataset"
            )
        readers = {p: self._reader_of(p) for p in inside}
        shards = [p for p in inside if readers[p]]
        kinds = {readers[p] for p in shards}
        if len(kinds) != 1:
            found = ", ".join(path.name for path in inside[:10]) or "nothing"
            raise RawTextsError(
                f"{self.path} must have shards of one kind ({', '.join(READERS)}); "
                f"found: {found}"
            )
        return shards

    @property
    def column_names(self) -> list[str]:
        """Column names of the first shard."""
        return self._columns[self.files[0]]

    @cached_property
    def _columns(self) -> dict[Path, list[str]]:
        """Column names by shard. On first access, the names of all shards are read."""
        return {shard: self._columns_of(shard) for shard in self.files}

    def _check_shards(self, wanted: Sequence[str]) -> None:
        for shard, present in self._columns.items():
            missing = [name for name in wanted if name not in present]
            if missing and self._reader_of(shard) is not JsonReader:
                raise RawTextsError(
                    f"{shard} lacks {', '.join(missing)}, which "
                    f"{self.files[0].name} has (its columns: {', '.join(present)}): "
                    "rename its column, or move the file out of the folder"
                )

    def digest(self, columns: Sequence[str]) -> str:
        """Return a digest of the files' bytes and of the options for reading them.
        Raises RawTextsError if a file cannot be read or lacks one of the columns."""
        self._check_shards(columns)
        form = vars(self.form).copy()
        if self.form.kind is None:  # Keys of earlier versions lack `kind`.
            del form["kind"]
        named = ((f"\0{f.name}\0{f.stat().st_size}\0", f) for f in self.files)
        with readable(self.path):
            return files_hash(json.dumps([list(columns), form]), named)

    def batches(self, columns: Sequence[str]) -> Iterator[RawBatch]:
        self._warn_if_misread()
        for shard in self.files:
            with readable(shard):
                yield from self._open(shard).batches(list(columns))

    def _warn_if_misread(self) -> None:
        """Log a warning that names the first UTF-8 file for which another encoding is
        set. This is no error, because a few bytes can be valid in both encodings."""
        if shard := next((s for s in self.files if self._open(s).is_misread()), None):
            logger.warning(
                "%s is a UTF-8 file that is read as %s, so that é becomes %s, for "
                "example: remove the encoding from the entry in the catalog. If other "
                "files of the folder need it, save them as UTF-8",
                *(shard, self.form.encoding),
                "é".encode().decode(self.form.encoding, errors="replace"),
            )

    def _reader_of(self, path: Path) -> type[FileReader] | None:
        """Return the reader class for a file, or None if its suffix is unknown. Raises
        RawTextsError if the `format` of the catalog entry is unknown."""
        if self.form.kind is None:
            return reader_of(path)
        if reader := READERS.get(f".{self.form.kind}"):
            return reader
        kinds = [suffix.removeprefix(".") for suffix in READERS]
        valid = ", ".join(kinds)
        raise RawTextsError(f"format: {self.form.kind!r} is unknown; valid: {valid}")

    def _columns_of(self, shard: Path) -> list[str]:
        with readable(shard):
            if shard.stat().st_size == 0:
                raise RawTextsError(f"{shard} is empty (0 bytes): choose another file")
            return self._open(shard).column_names()

    def _open(self, shard: Path) -> FileReader:
        reader, root = self._reader_of(shard), self.path
        if reader is None:
            if shard.suffix.lower() in SHEETS:
                raise RawTextsError(
                    f"{shard} is a workbook: save its sheet as CSV (UTF-8), and name "
                    "that file"
                )
            raise RawTextsError(
                f"{shard} has an unknown file type. Known: {', '.join(READERS)} "
                f"(csv and json also packed: {', '.join(PACKED)}). Rename the file, or "
                "name its kind in the entry, as format: csv"
            )
        inside = root.is_dir()
        source = shard.relative_to(root).as_posix() if inside else shard.name
        return reader(shard, source, self.form)


def reader_of(path: Path) -> type[FileReader] | None:
    """Return the reader class for a file's suffix, or None if the suffix is unknown."""
    suffixes = [s.lower() for s in path.suffixes if s.lower() not in PACKED]
    return READERS.get(suffixes[-1]) if suffixes else None
