"""Single files that are written only when their content would change."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from kedro.io import AbstractDataset, DatasetError
from kedro_datasets._typing import PlotlyPreview

from flatout.datasets._keyed import dataset_errors, log_changes
from flatout.engine.files.checked_paths import sweep, write_file
from flatout.engine.files.content_key import ContentKey

logger = logging.getLogger(__name__)
KEY_NAME = "flatout_key"


class _KeyedFile(AbstractDataset[Any, Any]):
    """A file that holds its own content key."""

    def __init__(
        self, *, filepath: str, metadata: dict[str, Any] | None = None
    ) -> None:
        self._file = Path(filepath)
        self.metadata = metadata

    def save(self, data: Any) -> None:
        stored = self._stored_key()
        if stored is not None and stored.digest == data.key.digest:
            logger.info("%s: unchanged, kept", self._file.stem)
            return
        log_changes(self._file.stem, data.key, stored)
        with dataset_errors():
            self._file.parent.mkdir(parents=True, exist_ok=True)
            if hasattr(data, "prepare"):
                data.prepare(self._file.parent)
            sweep(self._file.parent)
            write_file(self._file, lambda path: self._write(path, data))

    def _stored_key(self) -> ContentKey | None:
        try:
            fields = self._read_key()
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return ContentKey(fields)

    @abstractmethod
    def _read_key(self) -> dict[str, Any]: ...

    @abstractmethod
    def _write(self, path: Path, data: Any) -> None: ...

    def _missing(self) -> DatasetError:
        return DatasetError(
            f"{self._file} is not there: run the pipeline that makes it"
        )

    def _exists(self) -> bool:
        return self._file.is_file()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._file)}


class KeyedParquetDataset(_KeyedFile):
    """A Parquet file with its key in the schema's metadata. Loads as a DataFrame."""

    def load(self) -> Any:
        if not self._exists():
            raise self._missing()
        return pq.read_table(self._file).to_pandas()

    def _read_key(self) -> dict[str, Any]:
        metadata = pq.read_schema(self._file).metadata
        fields: dict[str, Any] = json.loads(metadata[KEY_NAME.encode()])
        return fields

    def _write(self, path: Path, data: Any) -> None:
        table: pa.Table = data.table()
        key = json.dumps(dict(data.key.fields))
        pq.write_table(table.replace_schema_metadata({KEY_NAME: key}), path)


class KeyedJSONDataset(_KeyedFile):
    """A JSON object with its key under `flatout_key`. Loads as a dict without it."""

    def load(self) -> dict[str, Any]:
        if not self._exists():
            raise self._missing()
        value: dict[str, Any] = json.loads(self._file.read_text(encoding="utf-8"))
        value.pop(KEY_NAME, None)
        return value

    def _read_key(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(self._file.read_text(encoding="utf-8"))[
            KEY_NAME
        ]
        return fields

    def _write(self, path: Path, data: Any) -> None:
        value: dict[str, Any] = {**data.value(), KEY_NAME: dict(data.key.fields)}
        path.write_text(
            json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8"
        )


class KeyedPlotlyDataset(_KeyedFile):
    """A figure of Plotly as JSON, its key in `layout.meta`. Loads as a figure."""

    def load(self) -> Any:
        import plotly.io

        if not self._exists():
            raise self._missing()
        return plotly.io.from_json(self._file.read_text(encoding="utf-8"))

    def preview(self) -> PlotlyPreview:
        """What Kedro-Viz shows at the node."""
        return PlotlyPreview(json.loads(self._file.read_text(encoding="utf-8")))

    def _read_key(self) -> dict[str, Any]:
        figure = json.loads(self._file.read_text(encoding="utf-8"))
        fields: dict[str, Any] = figure["layout"]["meta"][KEY_NAME]
        return fields

    def _write(self, path: Path, data: Any) -> None:
        figure = data.value()
        figure["layout"]["meta"] = {KEY_NAME: dict(data.key.fields)}
        path.write_text(json.dumps(figure), encoding="utf-8")
