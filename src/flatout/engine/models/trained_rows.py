"""Record of the rows that a saved model was trained on, for later evaluations.

A split with another seed puts train rows into the test split. With hashes of its train
rows, a model can report how many rows it has seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from flatout.engine.rows.rows import SplitRows, rows_from_dataset
from flatout.engine.rows.token_facts import SEQUENCES

FACTS, HASHES = "trained_on.json", "trained_rows.npy"
MOST_BYTES = 2**32
"""Maximum size of rows that are hashed, which reads them again; for larger data only
the key is stored."""
ROWS_AT_ONCE = 2**16
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class TrainedRows:
    """Train rows of a model, saved to its folder like a tokenizer."""

    key: str
    """Key of the train rows, which also identifies the other splits."""
    seed: int
    """Value of `runtime.seed` in the training."""
    num_rows: int
    hashes: Hashes | None
    """(N,) sorted, without duplicates."""

    @classmethod
    def of(cls, train: Any, key: str, seed: int) -> TrainedRows:
        """Record the `datasets.Dataset` of the training; `key` is its `token_key`."""
        rows = rows_from_dataset(train)
        small = rows.table.nbytes <= MOST_BYTES
        hashes = np.unique(row_hashes(rows)) if small else None
        return cls(key, seed, len(rows), hashes)

    @classmethod
    def read(cls, folder: str | Path | None) -> TrainedRows | None:
        """Read from a saved model's folder; None if it has no record."""
        path = Path(folder or "") / FACTS
        if not path.is_file():
            return None
        facts = json.loads(path.read_text(encoding="utf-8"))
        kept = path.with_name(HASHES)
        hashes = np.load(kept, allow_pickle=False) if kept.is_file() else None
        return cls(facts["train_key"], facts["seed"], facts["train_rows"], hashes)

    def save_pretrained(self, folder: str | Path) -> None:
        """Save next to the weights of the model."""
        facts = {
            "train_key": self.key,
            "train_rows": self.num_rows,
            "seed": self.seed,
        }
        text = json.dumps(facts, indent=2) + "\n"
        Path(folder, FACTS).write_text(text, encoding="utf-8")
        if self.hashes is not None:
            np.save(Path(folder, HASHES), self.hashes, allow_pickle=False)

    def count(self, rows: SplitRows) -> int | None:
        """Number of `rows` that were trained on; None if it is not known."""
        if self.hashes is None:
            return None
        return int(np.isin(row_hashes(rows), self.hashes).sum())


def row_hashes(rows: SplitRows) -> Hashes:
    """Hashes (N,) of each row's model inputs, without labels; of joined texts per
    document (documents,), of images stored as files the hashes of the files."""
    if "encoded" in rows.column_names:
        files = rows.table.column("encoded")
        views: Iterator[Any] = (file.as_buffer() for file in files)
    else:
        numbers = np.arange(len(rows))
        paired = SEQUENCES in rows.column_names
        parts, numbers = (rows, numbers) if paired else rows.sequences(numbers)
        starts = range(0, len(numbers), ROWS_AT_ONCE)
        found = (parts.views(numbers[start : start + ROWS_AT_ONCE]) for start in starts)
        views = map(np.ascontiguousarray, chain.from_iterable(found))
    return np.array([xxhash.xxh3_64_intdigest(view) for view in views], np.uint64)
