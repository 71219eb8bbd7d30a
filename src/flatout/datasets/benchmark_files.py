"""Results of the benchmark that not every mode makes: what was there stays."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pandas as pd
from kedro_datasets._typing import TablePreview

from flatout.datasets._entry import PathDataset
from flatout.engine.files.atomic_write import write_text
from flatout.places import project_path

logger = logging.getLogger(__name__)

UNWRITABLE = frozenset(
    {errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR}
)
"""Read-only, or a file stands where a folder should be."""


class CsvTable(PathDataset):
    """A CSV file that is whole whenever it is read: two machines of one sweep may write
    it in the same moment. Kedro's own type for one imports all of its kinds of tables,
    and SQLAlchemy with them."""

    def load(self) -> pd.DataFrame:
        self._check_there()
        # `trial_id` is text: 001.
        return pd.read_csv(
            self._path, dtype={"trial_id": str}, float_precision="round_trip"
        )

    def save(self, data: pd.DataFrame) -> None:
        _write(self._path, data.to_csv(index=False))

    def preview(self, nrows: int = 5) -> TablePreview:
        """What Kedro-Viz shows at the entry."""
        return TablePreview(pd.read_csv(self._path, nrows=nrows).to_dict("split"))


class KeptTable(CsvTable):
    """An empty table leaves the file as it is; a missing file loads as an empty
    table."""

    def load(self) -> pd.DataFrame:
        return super().load() if self._exists() else pd.DataFrame()

    def save(self, data: pd.DataFrame) -> None:
        if len(data):
            super().save(data)


class TunedParameters(PathDataset):
    """The parameters file of a Kedro environment, as text. An empty text leaves the
    file as it is. Where it cannot be written (a read-only conf/, a file conf/tuned),
    the text goes to `fallback`, and a warning says so: a benchmark's figures are not
    lost for that."""

    def __init__(
        self, *, filepath: str, fallback: str, metadata: dict[str, Any] | None = None
    ) -> None:
        super().__init__(filepath=filepath, metadata=metadata)
        self._fallback = Path(fallback)

    def load(self) -> str:
        self._check_there()
        return self._path.read_text(encoding="utf-8")

    def save(self, data: str) -> None:
        if not data:
            logger.info("%s: nothing recommended, left as it is", self._path)
            return
        try:
            _write(self._path, data)
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            _write(self._fallback, data)
            logger.warning(
                "%s cannot be written (%s). The recommended parameters are in %s: copy "
                "it there, or make %s a folder that can be written",
                self._path,
                error.strerror,
                self._fallback,
                self._path.parent,
            )
            return
        logger.info("%s: written; %s", self._path, self._how_to_train)

    @property
    def _how_to_train(self) -> str:
        """Only a folder beside `base` is an environment."""
        conf = self._path.parent.parent
        if conf.resolve() == Path(project_path("conf")).resolve():
            return "kedro run --env=tuned trains with it"
        if (conf / "base").is_dir():
            return f"kedro run --env=tuned --conf-source={conf} trains with it"
        return "copied to conf/tuned, kedro run --env=tuned trains with it"

    def _missing(self) -> str:
        return (
            f"{self._path} is not there yet: kedro run --pipelines=benchmark writes it"
        )

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._path), "fallback": str(self._fallback)}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
