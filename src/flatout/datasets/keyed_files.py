"""Single-file datasets that are rewritten only if their content would change."""

from __future__ import annotations

import json
from abc import abstractmethod
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from flatout.datasets._entry import dataset_errors
from flatout.datasets.keyed import KeyedDataset
from flatout.engine.files.arrow_folder import merge_batches
from flatout.engine.files.atomic_write import clear_leftovers, write_file
from flatout.engine.files.content_key import ContentKey

KEY_NAME = "flatout_key"


class _KeyedFile(KeyedDataset):
    """Base class of single-file datasets whose file contains the content key."""

    def _stored_key(self) -> ContentKey | None:
        try:
            return ContentKey(self._read_key())
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @abstractmethod
    def _read_key(self) -> dict[str, Any]: ...

    def _write(self, data: Any) -> None:
        write_file(self._path, partial(self._write_file, data))

    @abstractmethod
    def _write_file(self, data: Any, path: Path) -> None: ...

    def _read_json(self) -> Any:
        return json.loads(self._path.read_text(encoding="utf-8"))

    def _exists(self) -> bool:
        return self._path.is_file()


class KeyedParquetDataset(_KeyedFile):
    """A Parquet file whose content key is in its schema metadata. It loads as a pandas
    DataFrame."""

    def load(self) -> Any:
        self._check_not_empty()
        return pq.read_table(self._path).to_pandas()

    def _read_key(self) -> dict[str, Any]:
        metadata = pq.read_schema(self._path).metadata
        return dict(json.loads(metadata[KEY_NAME.encode()]))

    def _write_file(self, data: Any, path: Path) -> None:
        key = json.dumps(data.key.stored())
        pq.write_table(data.table().replace_schema_metadata({KEY_NAME: key}), path)


class ParquetStream(KeyedParquetDataset):
    """A Parquet file that is written from a stream of record batches. Every save
    rewrites the file.

    The saved object has a `schema` and a method `batches()` that yields Arrow record
    batches. At most one row group of about 32 MiB is in memory at a time.
    """

    def save(self, data: Any) -> None:
        with dataset_errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            clear_leftovers(self._path.parent)
            self._write(data)

    def _write_file(self, data: Any, path: Path) -> None:
        with pq.ParquetWriter(path, data.schema) as writer:
            for batch in merge_batches(data.batches(), data.schema):
                writer.write_batch(batch)


class KeyedJSONDataset(_KeyedFile):
    """A file with a JSON object, which contains its content key under `flatout_key`. It
    loads as a dict without that key."""

    def load(self) -> dict[str, Any]:
        self._check_not_empty()
        return {n: v for n, v in self._read_json().items() if n != KEY_NAME}

    def _read_key(self) -> dict[str, Any]:
        return dict(self._read_json()[KEY_NAME])

    def _write_file(self, data: Any, path: Path) -> None:
        value = {**data.value(), KEY_NAME: data.key.stored()}
        text = json.dumps(value, indent=2, ensure_ascii=False)
        path.write_text(text, encoding="utf-8")
