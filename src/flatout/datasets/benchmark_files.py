"""Datasets for the results of benchmarks and sweeps. Existing files are kept if a run
has no result for them."""

from __future__ import annotations

import logging
from typing import Any

import pandas as pd

from flatout.datasets._entry import PathDataset
from flatout.engine.files.atomic_write import write_text

logger = logging.getLogger(__name__)


class CsvTable(PathDataset):
    """A CSV file, written atomically because several machines of a sweep share it."""

    # Kedro's CSVDataset would import all pandas datasets, and with them SQLAlchemy.

    def load(self) -> pd.DataFrame:
        self._check_not_empty()
        # `trial_id` is text such as 001.
        return pd.read_csv(
            self._path, dtype={"trial_id": str}, float_precision="round_trip"
        )

    def save(self, data: pd.DataFrame) -> None:
        write_text(self._path, data.to_csv(index=False))


class KeptTable(CsvTable):
    """A CSV file that is kept unchanged when an empty table is saved. A missing file
    loads as an empty table."""

    def load(self) -> pd.DataFrame:
        return super().load() if self._exists() else pd.DataFrame()

    def save(self, data: pd.DataFrame) -> None:
        if len(data):
            super().save(data)


class TunedParameters(PathDataset):
    """The parameters file of a Kedro environment, as text. The file is kept unchanged
    when an empty text is saved."""

    def __init__(
        self,
        *,
        filepath: str,
        measured_in: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """`measured_in` contains the Kedro `environment` of the current run."""
        super().__init__(filepath=filepath, metadata=metadata)
        self._environment = (measured_in or {}).get("environment")

    def load(self) -> str:
        self._check_not_empty()
        return self._path.read_text(encoding="utf-8")

    def save(self, data: str) -> None:
        if not data:
            logger.info("%s: no recommendation, so nothing is written", self._path)
            return
        if self._environment:  # added to the last group of the text
            data += f"  environment: {self._environment}\n"
        write_text(self._path, data)
        folder = self._path.parent
        use = f"kedro run --env={folder.name}, with the same --params, trains with it"
        if folder.parent.name != "conf":
            use = "move it to a folder of conf/ to train with it"
        logger.info("%s: written; %s", self._path, use)

    def _missing(self) -> str:
        writer = "sweep" if self._path.parent.name == "best" else "benchmark"
        return (
            f"{self._path} is not there yet: kedro run --pipelines={writer} writes it"
        )
