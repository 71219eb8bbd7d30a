"""Labels of sessions, and the sessions on which a model trains."""

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
"""Names of normal sessions and lines in logs (loghub uses Normal; BGL uses -)."""
SEED = 1
"""Seed of the hash. The split hashes names without it, else a part is in one split."""
COLUMNS = ("session", "text", "label")
Part = Literal["all", "train", "rest"]


@dataclass(frozen=True)
class Deal:
    """Choice of sessions. `train`: a `share` of them, by a hash of their names, without
    the abnormal ones. `rest`: all others."""

    part: Part = "all"
    share: float = 0.8

    def takes(
        self, names: Sequence[str], labels: Sequence[str | None]
    ) -> npt.NDArray[np.bool_]:
        """(N,) mask of the sessions that are in this part."""
        if self.part == "all":
            return np.ones(len(names), dtype=bool)
        hashes = [xxhash.xxh3_64_intdigest(name.encode(), SEED) for name in names]
        places = np.array(hashes, np.uint64).astype(np.float64) / 2.0**64
        normal = np.array([label != ABNORMAL for label in labels], dtype=bool)
        in_train: npt.NDArray[np.bool_] = (places < self.share) & normal
        return in_train if self.part == "train" else ~in_train


def label_of(value: str) -> str:
    """Return `normal` or `abnormal` for a label in a log."""
    return NORMAL if value.strip().casefold() in NORMAL_NAMES else ABNORMAL


def read_labels(path: Path) -> dict[str, str]:
    """Return `normal` or `abnormal` by session, from a file with two columns, name and
    label. Raises RawTextsError."""
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
