"""Text files of one's own as raw rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset, DatasetError

from flatout.engine.data.file_reader import Format
from flatout.engine.data.text_files import TextFiles as _TextFiles


class TextFiles(AbstractDataset[None, Any]):
    """Read-only CSV, TSV, JSON lines, Parquet or Arrow: a file or a folder of shards.

    Streamed, so it may be larger than memory. Rows that cannot be read go to
    `rejected_rows` with their number.
    """

    def __init__(
        self,
        *,
        filepath: str,
        encoding: str = "utf-8",
        delimiter: str = ",",
        quote_char: str | None = '"',
        metadata: dict[str, Any] | None = None,
    ) -> None:
        if "://" in filepath:
            raise DatasetError(
                f"filepath: {filepath} is a URL, and TextFiles reads files of this "
                "machine, several times: mount the store or copy the files to "
                "data/01_raw. What fits in memory can come from a URL as "
                "pandas.ParquetDataset or pandas.CSVDataset; see "
                "conf/base/catalog_data.yml"
            )
        form = Format(encoding=encoding, delimiter=delimiter, quote_char=quote_char)
        try:
            form.arrow_encoding  # noqa: B018
        except LookupError as error:
            raise DatasetError(
                f"encoding: {encoding} is unknown; Python knows utf-8, latin-1, cp949, "
                "utf-16, ..."
            ) from error
        self._files = _TextFiles(Path(filepath), form)
        self.metadata = metadata

    def load(self) -> Any:
        """The reader, not the rows."""
        return self._files

    def save(self, data: None) -> None:
        raise DatasetError("text files are read-only")

    def _exists(self) -> bool:
        return self._files.path.exists()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._files.path), **vars(self._files.form)}
