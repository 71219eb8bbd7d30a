"""Parquet and Arrow files. (pyarrow.dataset reads no streams of Arrow, and needs five
options to stay within the memory of `ParquetFile`.)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flatout.engine.data.raw_texts import (
    BATCH_BYTES,
    BATCH_ROWS,
    RawBatch,
    RawTextsError,
)
from flatout.engine.data.readers.file_reader import FileReader


class ParquetReader(FileReader):
    def column_names(self) -> list[str]:
        return list(self._table().schema_arrow.names)

    def batches(self, columns: list[str]) -> Iterator[RawBatch]:
        start = 0
        try:
            table = self._table()
            size = _rows_a_batch(table.metadata)
            for batch in table.iter_batches(size, columns=columns):
                arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
                rows = np.arange(start, start + batch.num_rows)
                start += batch.num_rows
                yield RawBatch(self.source, rows, arrays)
        except (FileNotFoundError, PermissionError):
            raise
        except (pa.ArrowException, OSError) as error:
            raise self._corrupt(error) from error

    def _table(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self.path, page_checksum_verification=True)
        except (FileNotFoundError, PermissionError):
            raise
        except (pa.ArrowException, OSError) as error:
            raise self._corrupt(error) from error

    def _corrupt(self, error: Exception) -> RawTextsError:
        return self.fail(
            error,
            "it is damaged, cut short or no Parquet file. Write this shard again, or "
            "take it out of the folder",
        )


def _rows_a_batch(metadata: Any) -> int:
    """So many that they are about BATCH_BYTES unpacked."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    size = sum(group.total_byte_size for group in groups)
    fitting = BATCH_BYTES * int(metadata.num_rows) // max(1, size)
    return int(max(1, min(BATCH_ROWS, fitting)))


class ArrowReader(FileReader):
    def column_names(self) -> list[str]:
        return list(self._table().schema.names)

    def batches(self, columns: list[str]) -> Iterator[RawBatch]:
        start = 0
        for batch in self._table().select(columns).to_batches(max_chunksize=BATCH_ROWS):
            arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
            rows = np.arange(start, start + batch.num_rows)
            start += batch.num_rows
            yield RawBatch(self.source, rows, arrays)

    def _table(self) -> Any:
        """Memory-mapped table of an Arrow file or stream."""
        try:
            return pa.ipc.open_file(pa.memory_map(str(self.path))).read_all()
        except (FileNotFoundError, PermissionError):
            raise
        except (pa.ArrowException, OSError):
            pass  # perhaps a stream
        try:
            return pa.ipc.open_stream(pa.memory_map(str(self.path))).read_all()
        except (pa.ArrowException, OSError) as error:
            raise self.fail(
                error, "it is damaged, cut short or no Arrow file"
            ) from error
