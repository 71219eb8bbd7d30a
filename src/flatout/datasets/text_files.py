"""Text files of one's own as raw rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset, DatasetError

from flatout.datasets._keyed import dataset_errors
from flatout.engine.data.file_reader import Format
from flatout.engine.data.remote_files import RemoteFiles, shown
from flatout.engine.data.text_files import TextFiles as _TextFiles
from flatout.engine.data.text_files import reader_of
from flatout.places import project_path


class TextFiles(AbstractDataset[None, Any]):
    """Read-only CSV, TSV, JSON lines, Parquet or Arrow: a file or a folder of shards.

    Streamed, so it may be larger than memory. Rows that cannot be read go to
    `rejected_rows` with their number.

    `filepath` may be a URL of a store that fsspec knows (s3://, gs://, hf://,
    https://): its files are copied to `cache_dir`, and again where they have changed.
    `credentials` and `fs_args` are fsspec's for that store.
    """

    def __init__(
        self,
        *,
        filepath: str,
        encoding: str = "utf-8",
        delimiter: str = ",",
        quote_char: str | None = '"',
        cache_dir: str = "data/01_raw/fetched",
        credentials: dict[str, Any] | None = None,
        fs_args: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        form = Format(encoding=encoding, delimiter=delimiter, quote_char=quote_char)
        try:
            form.arrow_encoding  # noqa: B018
        except LookupError as error:
            raise DatasetError(
                f"encoding: {encoding} is unknown; Python knows utf-8, latin-1, cp949, "
                "utf-16, ..."
            ) from error
        self._filepath, self._form = filepath, form
        self._cache = Path(project_path(cache_dir))
        self._options = {**(credentials or {}), **(fs_args or {})}
        self.metadata = metadata

    @property
    def is_remote(self) -> bool:
        return "://" in self._filepath

    def load(self) -> Any:
        """The reader, not the rows."""
        path = self._fetched() if self.is_remote else Path(self._filepath)
        return _TextFiles(path, self._form)

    def _fetched(self) -> Path:
        remote = RemoteFiles(self._filepath, self._cache, reader_of, self._options)
        with dataset_errors():
            return remote.fetch()

    def save(self, data: None) -> None:
        raise DatasetError("text files are read-only")

    def _exists(self) -> bool:
        return self.is_remote or Path(self._filepath).exists()

    def _describe(self) -> dict[str, Any]:
        place = shown(self._filepath) if self.is_remote else self._filepath
        return {"filepath": place, **vars(self._form)}
