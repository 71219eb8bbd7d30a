"""Parquet and Arrow files. (pyarrow.dataset cannot read Arrow streams, and needs five
options to use as little memory as `ParquetFile`.)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flatout.engine.data.raw_texts import (
    BATCH_BYTES,
    BATCH_ROWS,
    RawBatch,
    numbered,
)
from flatout.engine.data.readers.file_reader import FileReader

_BROKEN = (
    "it is damaged, cut short or no Parquet file. Write this shard again, or take it "
    "out of the folder"
)


class ParquetReader(FileReader):
    def column_names(self) -> list[str]:
        with self.errors(_BROKEN):
            file = pq.ParquetFile(self.path, page_checksum_verification=True)
            return list(file.schema_arrow.names)

    def batches(self, columns: list[str]) -> Iterator[RawBatch]:
        with self.errors(_BROKEN):
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
        return list(self._table().schema.names)

    def batches(self, columns: list[str]) -> Iterator[RawBatch]:
        batches = self._table().select(columns).to_batches(max_chunksize=BATCH_ROWS)
        return numbered(self.source, batches)

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
            raise self.fail(
                error, "it is damaged, cut short or no Arrow file"
            ) from error
