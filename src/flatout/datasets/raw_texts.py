"""Datasets for raw rows and files, from the user or the Hugging Face Hub."""

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
    """Combines the catalog entries `raw_train_texts`, `raw_validation_texts` and
    `raw_test_texts` (if they exist) into the entry that the `split` pipeline reads."""

    content = "raw texts"

    def __init__(self, parts: dict[str, Any]) -> None:
        """`parts` maps split names to datasets. It must contain `train`."""
        self.parts = parts

    def load(self) -> SplitTexts:
        """Load all entries and return a reader that yields the rows of each split."""
        parts = self.parts.items()
        return SplitTexts({n: open_raw_texts(p.load(), entry_of(n)) for n, p in parts})

    def _describe(self) -> dict[str, Any]:
        return {name: part._describe() for name, part in self.parts.items()}


class TextFiles(ReadOnlyDataset):
    """A read-only CSV, TSV, JSON lines, Parquet or Arrow file, or a folder of them.

    Rows are streamed, so the data may be larger than memory. Rows that cannot be read
    are stored with their row numbers in `rejected_rows`. Set `column_names` if a CSV
    file has no header. Set `format` (csv, jsonl, parquet, ...) if the file name has no
    known suffix.

    `filepath` may be a URL that fsspec supports (s3://, gs://, hf://, https://). Its
    files are copied to `cache_dir`, and copied again if they have changed.
    `credentials` and `fs_args` are passed to fsspec.
    """

    content = "text files"

    def __init__(  # noqa: PLR0913 - all are catalog options
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
        """Return a reader that streams the rows."""
        with dataset_errors():
            path = self._remote.fetch() if self.is_remote else Path(self._filepath)
        return _TextFiles(path, self._form)

    def stamps(self, *, fetched: bool) -> dict[str, str | None]:
        """Return a hash of the metadata of each file at the URL, keyed by file name. If
        `fetched` is True, return the hashes at the time when the files were copied."""
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
    """A read-only data set from the Hub or a folder, loaded with `load_dataset`.

    `split` may combine several splits (`train+test`). If it is null, all splits are
    loaded separately. Set `revision` to a commit to always load the same rows.
    """

    # Kedro's HFDataset queries the Hub whenever it is printed, which fails without a
    # network. It also imports torch.

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
    """A read-only file or folder. Loading returns its path.

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
        return f"there is no file or folder {self._path}"
