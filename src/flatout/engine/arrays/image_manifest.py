"""Tables that name images, and their classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from flatout.engine.arrays.sources import ArraysError

MANIFESTS = (".parquet", ".jsonl", ".json", ".csv")


def read_manifest(path: Path, image: str, label: str | None) -> pd.DataFrame:
    """A table with the column `image`, and `label` where one is named. Raises
    ArraysError."""
    readers = {
        ".parquet": pd.read_parquet,
        ".jsonl": lambda file: pd.read_json(file, lines=True, dtype=False),
        ".json": lambda file: pd.read_json(file, dtype=False),
        ".csv": lambda file: pd.read_csv(file, dtype=str, keep_default_na=False),
    }
    kind = path.suffix.lower()
    if kind not in readers:
        kinds = ", ".join(MANIFESTS)
        raise ArraysError(f"{path}: a folder of class folders, or one of {kinds}")
    try:
        table: pd.DataFrame = readers[kind](path)  # type: ignore[operator]
    except (OSError, ValueError) as error:
        raise ArraysError(f"{path} cannot be read: {error}") from error
    _check_columns(path, table, image, label)
    if table.empty:
        raise ArraysError(f"{path} names no image: it has columns but no rows")
    return table


def _check_columns(path: Path, table: pd.DataFrame, image: str, label: Any) -> None:
    """Raises ArraysError."""
    wanted = {"images.image_column": image, "split.label_column": label}
    for parameter, name in wanted.items():
        if name is not None and name not in table:
            raise ArraysError(
                f"{path}: no column {name}; it has {list(table)}. Set {parameter}"
            )


def file_below(root: Path, name: Any) -> Path:
    """A path that a manifest gives may be from anywhere. Raises ArraysError."""
    file = (root / str(name)).resolve()
    if not file.is_relative_to(root.resolve()):
        raise ArraysError(f"{name!r} leads out of the manifest's folder {root}")
    return root / file.relative_to(root.resolve())
