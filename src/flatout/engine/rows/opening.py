"""Detection of the kind of rows in a folder or data set, by their column."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa

from flatout.engine.rows.arrow_rows import TokenRowsError
from flatout.engine.rows.rows import SplitRows

KINDS = {
    "input_ids": "flatout.engine.rows.tokens:TokenRows",
    "inputs": "flatout.engine.rows.arrays:ArrayRows",
    "encoded": "flatout.engine.rows.encoded_images:EncodedImages",
}
"""Module and class for each column."""


def open_rows(folder: Path) -> SplitRows:
    """Memory-map the Arrow files of a folder written by `save_to_disk`. Raises
    TokenRowsError."""
    files = sorted(folder.glob("*.arrow"))
    if not files:
        raise TokenRowsError(
            f"no Arrow file in {folder}: run the pipeline that makes it first"
        )
    names = pa.ipc.open_stream(pa.memory_map(str(files[0]))).schema.names
    rows: SplitRows = _kind(names).open(folder)
    return rows


def rows_from_dataset(dataset: Any) -> SplitRows:
    """Use the rows of a `datasets.Dataset`. Raises TokenRowsError."""
    rows: SplitRows = _kind(dataset.column_names).from_dataset(dataset)
    return rows


def _kind(columns: list[str]) -> Any:
    for column, path in KINDS.items():
        if column in columns:
            module, _, name = path.partition(":")
            return getattr(import_module(module), name)
    raise TokenRowsError(
        f"rows need one of the columns {', '.join(KINDS)}; found {columns}"
    )
