"""Record batches kept on the disk between two passes over them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from flatout.engine.files.atomic_folder import storage_error


class Spool:
    """Batches of one schema, packed with LZ4, in a file without a name: its room is
    free again when the process ends, however it does. `folder` None: where temporary
    files go. Raises StorageError where the disk is full."""

    def __init__(self, folder: Path | None, schema: Any) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder or Path(tempfile.gettempdir())
        self._file = tempfile.TemporaryFile(dir=self._folder)
        packed = pa.ipc.IpcWriteOptions(compression="lz4")
        self._writer = pa.ipc.new_file(self._file, schema, options=packed)

    def add(self, batch: Any) -> None:
        try:
            self._writer.write_batch(batch)
        except OSError as error:
            raise storage_error(self._folder, error) from error

    def close(self) -> None:
        """No batch comes after this."""
        try:
            self._writer.close()
            self._file.flush()
        except OSError as error:
            raise storage_error(self._folder, error) from error

    def __iter__(self) -> Iterator[Any]:
        """One batch in memory at a time, as often as asked for."""
        reader = pa.ipc.open_file(self._file)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)
