"""Text files of one's own as raw rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset, DatasetError

from flatout.datasets._keyed import dataset_errors
from flatout.engine.data.forms.given_splits import SplitTexts, entry_of
from flatout.engine.data.raw_texts import open_raw_texts
from flatout.engine.data.readers.file_reader import Format
from flatout.engine.data.readers.remote_files import RemoteFiles, shown
from flatout.engine.data.readers.text_files import TextFiles as _TextFiles
from flatout.engine.data.readers.text_files import reader_of
from flatout.places import project_path


class OwnSplits(AbstractDataset[None, Any]):
    """Entries `raw_train_texts`, `raw_validation_texts` and `raw_test_texts`, as far
    as there are such, as the one that the split reads."""

    def __init__(self, parts: dict[str, Any]) -> None:
        """Data sets by split; `train` is one of them."""
        self.parts = parts

    def load(self) -> SplitTexts:
        """Readers, not rows, where the entries load as such."""
        return SplitTexts(
            {
                name: open_raw_texts(part.load(), entry_of(name))
                for name, part in self.parts.items()
            }
        )

    def save(self, data: None) -> None:
        raise DatasetError("raw texts are read-only")

    def _describe(self) -> dict[str, Any]:
        return {name: part._describe() for name, part in self.parts.items()}


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
        with dataset_errors():
            return self._remote.fetch()

    def stamps(self, *, fetched: bool) -> dict[str, str | None]:
        """Of a URL, by file: what the store says of it, or said of the copy."""
        with dataset_errors():
            return self._remote.fetched_stamps() if fetched else self._remote.stamps()

    @property
    def _remote(self) -> RemoteFiles:
        return RemoteFiles(self._filepath, self._cache, reader_of, self._options)

    def save(self, data: None) -> None:
        raise DatasetError("text files are read-only")

    def _exists(self) -> bool:
        return self.is_remote or Path(self._filepath).exists()

    def _describe(self) -> dict[str, Any]:
        place = shown(self._filepath) if self.is_remote else self._filepath
        return {"filepath": place, **vars(self._form)}
