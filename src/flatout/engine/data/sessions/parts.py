"""Labels of sessions, and which of them a model trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import xxhash

from flatout.engine.data.columns import listed
from flatout.engine.data.raw_texts import RawTextsError, name_of
from flatout.engine.data.readers.text_files import TextFiles

NORMAL, ABNORMAL = "normal", "abnormal"
NORMAL_NAMES = frozenset({"normal", "-", "0", "0.0", "false", "no"})
"""What logs say of normal sessions and lines (loghub has Normal, and - in BGL)."""
SEED = 1
"""Of the hash. Split hashes names with none: all of one part would be in one split."""
COLUMNS = ("session", "text", "label")
Part = Literal["all", "train", "rest"]


@dataclass(frozen=True)
class Deal:
    """`train`: `share` of the sessions, by a hash of their names, without those that
    are abnormal. `rest`: all the others."""

    part: Part = "all"
    share: float = 0.8

    def takes(
        self, names: Sequence[str], labels: Sequence[str | None]
    ) -> npt.NDArray[np.bool_]:
        """(N,) which of N sessions are in this part."""
        if self.part == "all":
            return np.ones(len(names), dtype=bool)
        hashes = [xxhash.xxh3_64_intdigest(name.encode(), SEED) for name in names]
        places = np.array(hashes, np.uint64).astype(np.float64) / 2.0**64
        normal = np.array([label != ABNORMAL for label in labels], dtype=bool)
        in_train: npt.NDArray[np.bool_] = (places < self.share) & normal
        return in_train if self.part == "train" else ~in_train


def label_of(value: str) -> str:
    """`normal` or `abnormal`, for what a log says."""
    return NORMAL if value.strip().casefold() in NORMAL_NAMES else ABNORMAL


def read_labels(path: Path) -> dict[str, str]:
    """`normal` or `abnormal` by session: of a file of two columns, name and label.
    Raises RawTextsError."""
    reader = TextFiles(path)
    columns = reader.column_names
    if len(columns) != 2:
        raise RawTextsError(
            f"{path} has the columns {listed(columns)}; a file of labels has two, the "
            "session's name and its label (Normal or Anomaly)"
        )
    found: dict[str, str] = {}
    for batch in reader.batches(columns):
        names, labels = (batch.columns[column].to_pylist() for column in columns)
        for name, label in zip(names, labels, strict=True):
            if name is not None and label is not None:
                found[name_of(name)] = label_of(name_of(label))
    return found
