"""Raw rows and files of the user, or of the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.io import DatasetError

from flatout.datasets._entry import PathDataset, ReadOnlyDataset, dataset_errors
from flatout.engine.data.given_splits import SplitTexts, entry_of
from flatout.engine.data.raw_texts import open_raw_texts
from flatout.engine.data.readers.file_reader import Format
from flatout.engine.data.readers.remote_files import RemoteFiles, shown
from flatout.engine.data.readers.text_files import TextFiles as _TextFiles, reader_of
from flatout.engine.parameters.faults import first_line
from flatout.places import project_path


class OwnSplits(ReadOnlyDataset):
    """Combines the entries `raw_train_texts`, `raw_validation_texts` and
    `raw_test_texts`, if they exist, to one entry that the split reads."""

    content = "raw texts"

    def __init__(self, parts: dict[str, Any]) -> None:
        """`parts`: datasets by split; includes `train`."""
        self.parts = parts

    def load(self) -> SplitTexts:
        """Return readers instead of rows if the entries load as readers."""
        return SplitTexts(
            {
                name: open_raw_texts(part.load(), entry_of(name))
                for name, part in self.parts.items()
            }
        )

    def _describe(self) -> dict[str, Any]:
        return {name: part._describe() for name, part in self.parts.items()}


class TextFiles(ReadOnlyDataset):
    """Read-only CSV, TSV, JSON lines, Parquet or Arrow: a file or a folder of shards.

    Rows are streamed and may exceed memory. Rows that cannot be read go to
    `rejected_rows` with their number. A CSV file without a header needs
    `column_names`. `format` (csv, jsonl, parquet, ...) is needed if the file's name
    has no known suffix.

    `filepath` may be a URL of a store that fsspec supports (s3://, gs://, hf://,
    https://): its files are copied to `cache_dir`, and again if they have changed.
    `credentials` and `fs_args` are fsspec's for that store.
    """

    content = "text files"

    def __init__(  # noqa: PLR0913 - an option of the catalog each
        self,
        *,
        filepath: str,
        encoding: str = "utf-8",
        delimiter: str = ",",
        quote_char: str | None = '"',
        column_names: list[str] | None = None,
        format: str | None = None,
        cache_dir: str = "data/01_raw/fetched",
        credentials: dict[str, Any] | None = None,
        fs_args: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        names = tuple(column_names) if column_names else None
        with dataset_errors():
            self._form = Format(encoding, delimiter, quote_char, names, format)
        self._filepath = filepath
        self._cache = Path(project_path(cache_dir))
        self._options = {**(credentials or {}), **(fs_args or {})}
        self.metadata = metadata

    @property
    def is_remote(self) -> bool:
        return "://" in self._filepath

    def load(self) -> Any:
        """Return the reader, not the rows."""
        with dataset_errors():
            path = self._remote.fetch() if self.is_remote else Path(self._filepath)
        return _TextFiles(path, self._form)

    def stamps(self, *, fetched: bool) -> dict[str, str | None]:
        """Metadata hashes of a URL, by file: those of the store, or of the copy."""
        with dataset_errors():
            return self._remote.fetched_stamps() if fetched else self._remote.stamps()

    @property
    def _remote(self) -> RemoteFiles:
        return RemoteFiles(self._filepath, self._cache, reader_of, self._options)

    def _exists(self) -> bool:
        return self.is_remote or Path(self._filepath).exists()

    def _describe(self) -> dict[str, Any]:
        place = shown(self._filepath) if self.is_remote else self._filepath
        return {"filepath": place, **vars(self._form)}


class HubTexts(ReadOnlyDataset):
    """Read-only rows of `name` on the Hub (or of a folder), by `datasets.load_dataset`.

    `split` may join several (`train+test`); null: the splits of the data set.
    `revision`, a commit, always gives the same rows. (Kedro's HFDataset queries the
    Hub each time its name is printed: it fails without network, and imports torch.)
    """

    content = "data sets of the Hub"

    def __init__(
        self,
        *,
        name: str,
        split: str | None = "train",
        subset: str | None = None,
        revision: str | None = None,
        cache_dir: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        self._name, self._subset = name, subset
        self._options = {"split": split, "revision": revision, "cache_dir": cache_dir}
        self.metadata = metadata

    def load(self) -> Any:
        from datasets import config, load_dataset

        try:
            return load_dataset(self._name, self._subset, **self._options)
        except (OSError, ValueError, RuntimeError) as error:
            cache = self._options["cache_dir"] or config.HF_DATASETS_CACHE
            raise DatasetError(
                f"the data set {self._name!r} could not be loaded "
                f"({first_line(error)}). It was looked for as a folder, in the cache "
                f"{cache} and on the Hugging Face Hub. Check its name, subset and "
                "split; without network fill the cache elsewhere, or give the files "
                "themselves (flatout.datasets.TextFiles)"
            ) from error

    def _describe(self) -> dict[str, Any]:
        return {"name": self._name, "subset": self._subset, **self._options}


class RawFiles(PathDataset, ReadOnlyDataset):
    """A file or a folder, read-only. Loads as its path.

    Example:
        ```yaml
        raw_images:
          type: flatout.datasets.RawFiles
          filepath: data/01_raw/photos
        ```
    """

    content = "raw files"

    def load(self) -> Path:
        self._check_not_empty()
        return self._path

    def _missing(self) -> str:
        return f"there is no file and no folder {self._path}"
