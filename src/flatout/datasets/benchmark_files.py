"""Results of the benchmark that only some modes make: existing files are kept."""

from __future__ import annotations

import errno
import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from kedro_datasets._typing import TablePreview

from flatout.datasets._entry import PathDataset
from flatout.engine.files.atomic_write import write_text
from flatout.engine.parameters.common import by_path
from flatout.places import project_path

logger = logging.getLogger(__name__)

UNWRITABLE = frozenset(
    {errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR}
)
"""Errors of read-only places, and of a file with the name of a folder."""


class CsvTable(PathDataset):
    """A CSV file that is complete at every moment: two machines of one sweep may write
    it at the same time. Kedro's type for CSV imports all of its kinds of tables, and
    SQLAlchemy with them."""

    def load(self) -> pd.DataFrame:
        self._check_there()
        # `trial_id` is text: 001.
        return pd.read_csv(
            self._path, dtype={"trial_id": str}, float_precision="round_trip"
        )

    def save(self, data: pd.DataFrame) -> None:
        _write(self._path, data.to_csv(index=False))

    def preview(self, nrows: int = 5) -> TablePreview:
        """The preview that Kedro-Viz shows at the entry."""
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
    file unchanged. If it cannot be written (a read-only conf/, a file conf/tuned),
    the text goes to `fallback` with a warning, so that a benchmark's figures are not
    lost."""

    def __init__(
        self,
        *,
        filepath: str,
        fallback: str,
        measured_in: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """`measured_in`: `environment` and `params` of the run that saves it."""
        super().__init__(filepath=filepath, metadata=metadata)
        self._fallback = Path(fallback)
        self._environment = (measured_in or {}).get("environment")
        self._params = (measured_in or {}).get("params") or {}

    def load(self) -> str:
        self._check_there()
        return self._path.read_text(encoding="utf-8")

    def save(self, data: str) -> None:
        if not data:
            logger.info("%s: nothing recommended, left as it is", self._path)
            return
        how = self._how_to_train(yaml.safe_load(data))
        if self._environment:  # the group `environment` is in is the last one
            data += f"  environment: {self._environment}\n"
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
        logger.info("%s: written; %s", self._path, how)

    def _how_to_train(self, tuned: Mapping[str, Any]) -> str:
        """Return the command; only a folder next to `base` is an environment."""
        conf = self._path.parent.parent
        name = self._path.parent.name
        command = f"kedro run --env={name}{self._given(tuned)}"
        if conf.resolve() == Path(project_path("conf")).resolve():
            return f"{command} trains with it"
        if (conf / "base").is_dir():
            return f"{command} --conf-source={shlex.quote(str(conf))} trains with it"
        return f"copied to conf/{name}, {command} trains with it"

    def _given(self, tuned: Mapping[str, Any]) -> str:
        """Parameters of this command line, without those of the pipeline and those in
        `tuned`."""
        found = dict(by_path(tuned))
        given = [
            f"{path}={value}"
            for path, value in by_path(self._params)
            if not path.startswith(("benchmark.", "sweep.")) and path not in found
        ]
        return f" --params={shlex.quote(','.join(given))}" if given else ""

    def _missing(self) -> str:
        writer = "sweep" if self._path.parent.name == "best" else "benchmark"
        return (
            f"{self._path} is not there yet: kedro run --pipelines={writer} writes it"
        )

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._path), "fallback": str(self._fallback)}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
