"""Record batches stored on the disk between two passes over them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa


class Spool:
    """Batches, compressed with LZ4, in unnamed files (one for each run of batches with
    one schema): the space is freed when the process ends, even if it is killed.
    `folder` None: the folder for temporary files."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder or Path(tempfile.gettempdir())
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: list[Any] = []
        self._schema: Any = None
        self._writer: Any = None

    def add(self, batch: Any) -> None:
        if batch.schema != self._schema:
            self.close()
            self._schema = batch.schema
            self._files.append(tempfile.TemporaryFile(dir=self._folder))
            packed = pa.ipc.IpcWriteOptions(compression="lz4")
            self._writer = pa.ipc.new_file(
                self._files[-1], batch.schema, options=packed
            )
        self._writer.write_batch(batch)

    def close(self) -> None:
        """Finish the current file; no batch follows."""
        if self._writer is not None:
            self._writer.close()
            self._files[-1].flush()

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches, one in memory at a time; may be repeated."""
        for file in self._files:
            reader = pa.ipc.open_file(file)
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index)
