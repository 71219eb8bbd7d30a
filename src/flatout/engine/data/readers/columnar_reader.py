"""Parquet and Arrow files. (pyarrow.dataset cannot read Arrow streams, and needs five
options to use as little memory as `ParquetFile`.)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flatout.engine.data.raw_texts import BATCH_BYTES, BATCH_ROWS, RawBatch, numbered
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
            size = _rows_a_batch(table.metadata)
            yield from numbered(self.source, table.iter_batches(size, columns=columns))


def _rows_a_batch(metadata: Any) -> int:
    """Number of rows whose unpacked size is about BATCH_BYTES."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    size = sum(group.total_byte_size for group in groups)
    fitting = BATCH_BYTES * int(metadata.num_rows) // max(1, size)
    return int(max(1, min(BATCH_ROWS, fitting)))


class ArrowReader(FileReader):
    def column_names(self) -> list[str]:
        schema = self._table().schema
        try:
            return list(schema.names)
        except UnicodeDecodeError as error:  # pyarrow decodes names when asked
            raise self.fail(error, _BROKEN_ARROW) from error

    def batches(self, columns: list[str]) -> Iterator[RawBatch]:
        """Yield batches. Raises RawTextsError if an offset is outside of the values,
        which reading does not check. (Texts are checked as bytes, because a text that
        is no UTF-8 is one rejected row, not a damaged file.)"""
        table = self._table().select(columns)
        with self.errors(_BROKEN_ARROW):
            for chunk in (chunk for column in table.columns for chunk in column.chunks):
                chunk.view(_as_bytes(chunk.type)).validate(full=True)
        return numbered(self.source, table.to_batches(max_chunksize=BATCH_ROWS))

    def _table(self) -> Any:
        """Memory-mapped table of an Arrow file or stream."""
        try:
            return pa.ipc.open_file(pa.memory_map(str(self.path))).read_all()
        except (FileNotFoundError, PermissionError):
            raise
        except (pa.ArrowException, OSError):
            pass  # may be a stream
        try:
            return pa.ipc.open_stream(pa.memory_map(str(self.path))).read_all()
        except (pa.ArrowException, OSError) as error:
            raise self.fail(error, _BROKEN_ARROW) from error


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """Return `kind` with binary values instead of strings, at any depth."""
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _as_bytes(kind.value_type), kind.ordered)
    if pa.types.is_list(kind):
        return pa.list_(_as_bytes(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_as_bytes(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(_as_bytes(f.type)) for f in kind])
    return _BYTES.get(kind, kind)


_BYTES = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}
