"""Parquet files that are written a batch at a time."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from kedro.io import AbstractDataset, DatasetError

from flatout.datasets._keyed import dataset_errors
from flatout.engine.files.arrow_folder import merge_batches
from flatout.engine.files.checked_paths import sweep, write_file


class ParquetStream(AbstractDataset[Any, Any]):
    """A Parquet file, whole or absent. Loads as a DataFrame.

    Saving takes something with `schema` and `batches()` (Arrow record batches), and
    holds as many in memory as make a row group of about 32 MiB.
    """

    def __init__(
        self, *, filepath: str, metadata: dict[str, Any] | None = None
    ) -> None:
        self._file = Path(filepath)
        self.metadata = metadata

    def save(self, data: Any) -> None:
        with dataset_errors():
            self._file.parent.mkdir(parents=True, exist_ok=True)
            sweep(self._file.parent)
            write_file(self._file, partial(_write, data))

    def load(self) -> Any:
        if not self._exists():
            raise DatasetError(
                f"{self._file} is not there: run the pipeline that makes it"
            )
        return pq.read_table(self._file).to_pandas()

    def _exists(self) -> bool:
        return self._file.is_file()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._file)}


def _write(data: Any, path: Path) -> None:
    with pq.ParquetWriter(path, data.schema) as writer:
        for batch in merge_batches(data.batches(), data.schema):
            writer.write_batch(batch)
