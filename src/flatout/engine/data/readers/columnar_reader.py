"""Read Parquet and Arrow files.

pyarrow.dataset is not used because it cannot read Arrow streams, and because it needs
five options to limit memory use as well as `ParquetFile` does without options.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flatout.engine.data.raw_texts import (
    RawBatch,
    numbered,
    open_raw_texts,
    rows_at_once,
)
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
        """Return an iterator over batches. Raises RawTextsError if an offset points
        outside the values, which pyarrow does not check when it reads a file."""
        table = self._table().select(columns)
        with self.errors(_BROKEN_ARROW):
            for chunk in (chunk for column in table.columns for chunk in column.chunks):
                _check_offsets(chunk)
        return open_raw_texts(table, self.source).batches(columns)

    def _table(self) -> Any:
        with self.errors(_BROKEN_ARROW):
            file = pa.memory_map(str(self.path))
            with suppress(pa.ArrowInvalid):  # The file may be a stream.
                return pa.ipc.open_file(file).read_all()
            file.seek(0)
            return pa.ipc.open_stream(file).read_all()


def _check_offsets(array: Any) -> None:
    """Raise ArrowInvalid if the buffers of an Arrow array are corrupt. Invalid UTF-8 is
    accepted, because only the affected rows are rejected later. (pyarrow checks UTF-8
    last, so an error about UTF-8 means that all other checks have passed.)"""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
