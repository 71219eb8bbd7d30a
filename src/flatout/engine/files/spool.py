"""Record batches kept on the disk between two passes over them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from flatout.engine.files.atomic_folder import storage_error


class Spool:
    """Batches, packed with LZ4, in files without a name (one for each run of batches
    of one schema): their room is free again when the process ends, however it does.
    `folder` None: where temporary files go. Raises StorageError where the disk is
    full."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder or Path(tempfile.gettempdir())
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: list[Any] = []
        self._schema: Any = None
        self._writer: Any = None

    def add(self, batch: Any) -> None:
        try:
            if batch.schema != self._schema:
                self._open(batch.schema)
            self._writer.write_batch(batch)
        except OSError as error:
            raise storage_error(self._folder, error) from error

    def _open(self, schema: Any) -> None:
        self.close()
        self._schema = schema
        self._files.append(tempfile.TemporaryFile(dir=self._folder))
        packed = pa.ipc.IpcWriteOptions(compression="lz4")
        self._writer = pa.ipc.new_file(self._files[-1], schema, options=packed)

    def close(self) -> None:
        """No batch comes after this."""
        if self._writer is None:
            return
        try:
            self._writer.close()
            self._files[-1].flush()
        except OSError as error:
            raise storage_error(self._folder, error) from error

    def __iter__(self) -> Iterator[Any]:
        """One batch in memory at a time, as often as asked for."""
        for file in self._files:
            reader = pa.ipc.open_file(file)
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index)
