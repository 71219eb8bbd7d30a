"""Raw files that a pipeline reads by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset, DatasetError


class RawFiles(AbstractDataset[None, Path]):
    """A file or a folder, read-only. Loads as its path.

    Example:
        ```yaml
        raw_images:
          type: flatout.datasets.RawFiles
          filepath: data/01_raw/photos
        ```
    """

    def __init__(
        self, *, filepath: str, metadata: dict[str, Any] | None = None
    ) -> None:
        self._path = Path(filepath)
        self.metadata = metadata

    def load(self) -> Path:
        if not self._path.exists():
            raise DatasetError(f"there is no file and no folder {self._path}")
        return self._path

    def save(self, data: None) -> None:
        raise DatasetError("raw files are read, never written")

    def _exists(self) -> bool:
        return self._path.exists()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._path)}
