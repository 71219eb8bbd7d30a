"""Read Parquet and Arrow files.

pyarrow.dataset is not used because it cannot read Arrow streams, and because it needs
five options to limit memory use as well as `ParquetFile` does without options.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flatout.engine.data.raw_texts import RawBatch, numbered, rows_at_once
from flatout.engine.data.readers.file_reader import FileReader

_REMEDY = ". Write this shard again, or take it out of the folder"
_BROKEN_PARQUET = f"it is damaged, cut short or no Parquet file{_REMEDY}"
_BROKEN_ARROW = f"it is damaged, cut short or no Arrow file{_REMEDY}"


class ParquetReader(FileReader):
    def column_names(self) -> list[str]:
        with self.errors(_BROKEN_PARQUET):
            file = pq.ParquetFile(self.path, page_checksum_verification=True)
            return list(file.schema_arrow.names)

    def batches(self, columns: list[str]) -> Iterator[RawBatch]:
        with self.errors(_BROKEN_PARQUET):
            table = pq.ParquetFile(self.path, page_checksum_verification=True)
            facts = table.metadata
            groups = map(facts.row_group, range(facts.num_row_groups))
            unpacked = sum(group.total_byte_size for group in groups)
            size = rows_at_once(facts.num_rows, unpacked)
            yield from numbered(self.source, table.iter_batches(size, columns=columns))


class ArrowReader(FileReader):
    def column_names(self) -> list[str]:
        schema = self._table().schema
        try:
            return list(schema.names)
        except UnicodeDecodeError as error:  # pyarrow decodes names on access.
            raise self.fail(error, _BROKEN_ARROW) from error

    def batches(self, columns: list[str]) -> Iterator[RawBatch]:
        """Return an iterator over batches of `columns`. Raises RawTextsError if an
        offset points outside the values. pyarrow does not check offsets when it reads a
        file."""
        table = self._table().select(columns)
        with self.errors(_BROKEN_ARROW):
            for chunk in (chunk for column in table.columns for chunk in column.chunks):
                _check_offsets(chunk)
        size = rows_at_once(table.num_rows, table.nbytes)
        return numbered(self.source, table.to_batches(max_chunksize=size))

    def _table(self) -> Any:
        try:
            return pa.ipc.open_file(pa.memory_map(str(self.path))).read_all()
        except (FileNotFoundError, PermissionError):
            raise
        except (pa.ArrowException, OSError):
            pass  # The file may be a stream.
        try:
            return pa.ipc.open_stream(pa.memory_map(str(self.path))).read_all()
        except (pa.ArrowException, OSError) as error:
            raise self.fail(error, _BROKEN_ARROW) from error


def _check_offsets(array: Any) -> None:
    """Raise ArrowInvalid if the buffers of an Arrow array are corrupt. Invalid UTF-8 is
    accepted, because only the affected rows are rejected later. (pyarrow checks UTF-8
    last, so an error about UTF-8 means that all other checks have passed.)"""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
