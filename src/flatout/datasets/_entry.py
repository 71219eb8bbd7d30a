"""Code that flatout's catalog entries share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from kedro.io import AbstractDataset, DatasetError


@contextmanager
def dataset_errors() -> Iterator[None]:
    """Raise errors of the engine as Kedro's errors, with the same text, unwrapped."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        raise DatasetError(str(error)) from error


class PathDataset(AbstractDataset[Any, Any]):
    """A local file or folder."""

    def __init__(
        self, *, filepath: str, metadata: dict[str, Any] | None = None
    ) -> None:
        self._path = Path(filepath)
        self.metadata = metadata

    @property
    def path(self) -> Path:
        return self._path

    def _check_not_empty(self) -> None:
        """Raise DatasetError if there is no data to load."""
        if not self._exists():
            raise DatasetError(self._missing())

    def _missing(self) -> str:
        return f"{self._path} is not there: run the pipeline that makes it"

    def _exists(self) -> bool:
        return self._path.exists()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._path)}


class ReadOnlyDataset(AbstractDataset[None, Any]):
    """Rows or files that pipelines only read."""

    content: ClassVar[str]
    """Name of its content in messages."""

    def save(self, data: None) -> None:
        raise DatasetError(f"{self.content} are read-only")

    def _exists(self) -> bool:
        return True
