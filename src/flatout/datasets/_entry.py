"""Base classes of flatout's Kedro datasets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from kedro.io import AbstractDataset, DatasetError


@contextmanager
def dataset_errors() -> Iterator[None]:
    """Context manager that re-raises the engine's errors as DatasetError, whose message
    Kedro shows unchanged."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        raise DatasetError(str(error)) from error


class PathDataset(AbstractDataset[Any, Any]):
    """Base class of datasets that consist of a local file or folder."""

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
    """Base class of datasets that pipelines only read."""

    content: ClassVar[str]
    """A description of the contents, used in error messages."""

    def save(self, data: None) -> None:
        raise DatasetError(f"{self.content} are read-only")

    def _exists(self) -> bool:
        return True
