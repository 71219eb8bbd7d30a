"""Record on which rows a saved model was trained, for later evaluations.

If data is split again with a different seed, train rows can move to the test split. The
hashes of the train rows are saved with the model, so that flatout can report how many
of the evaluated rows were train rows.
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
"""The maximum size in bytes of train data to hash, because hashing reads all data
again. For larger data, only the key is stored."""
ROWS_AT_ONCE = 2**16
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class TrainedRows:
    """A record of a model's train rows, saved to the model's folder."""

    key: str
    """The content key of the train rows. The other splits have the same key."""
    seed: int
    """The value of `runtime.seed` in the training run."""
    num_rows: int
    hashes: Hashes | None
    """The distinct hashes of the rows in ascending order, or None for large data."""

    @classmethod
    def of(cls, train: Any, key: str, seed: int) -> TrainedRows:
        """Create a record of the `Dataset` `train` with the `token_key` `key`."""
        rows = rows_from_dataset(train)
        small = rows.table.nbytes <= MOST_BYTES
        hashes = np.unique(row_hashes(rows)) if small else None
        return cls(key, seed, len(rows), hashes)

    @classmethod
    def read(cls, folder: str | Path | None) -> TrainedRows | None:
        """Read the record from a saved model's folder. Return None if there is none."""
        path = Path(folder or "") / FACTS
        if not path.is_file():
            return None
        facts = json.loads(path.read_text(encoding="utf-8"))
        kept = path.with_name(HASHES)
        hashes = np.load(kept, allow_pickle=False) if kept.is_file() else None
        return cls(facts["train_key"], facts["seed"], facts["train_rows"], hashes)

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the record next to the model's weights."""
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
        """Return how many of `rows` are train rows, or None if there are no hashes."""
        if self.hashes is None:
            return None
        return int(np.isin(row_hashes(rows), self.hashes).sum())


def row_hashes(rows: SplitRows) -> Hashes:
    """Return a hash of each row's model input, without labels, as an array (N,). If a
    row consists of several concatenated texts, each text is hashed instead. For images
    stored as files, the files are hashed."""
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
