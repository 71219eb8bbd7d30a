"""What a saved model was trained on: kept beside its weights, asked by evaluations.

A split with another seed puts train rows among the test rows. A model that knows its
rows by their hashes tells how many it has seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from flatout.engine.rows.opening import rows_from_dataset
from flatout.engine.rows.rows import SplitRows

FACTS, HASHES = "trained_on.json", "trained_rows.npy"
MOST_BYTES = 2**32
"""Of rows that are read once more for their hashes; of larger data the key alone is
kept."""
ROWS_AT_ONCE = 2**16
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class TrainedRows:
    """The train rows of a model, saved like a tokenizer into its folder."""

    key: str
    """Of the train rows, which names the rest of the split, too."""
    seed: int
    """`runtime.seed` of the training."""
    num_rows: int
    hashes: Hashes | None
    """(N,) sorted, each once."""

    @classmethod
    def of(cls, train: Any, key: str, seed: int) -> TrainedRows:
        """Of the `datasets.Dataset` that was trained on; `key`: its `token_key`."""
        rows = rows_from_dataset(train)
        small = rows.table.nbytes <= MOST_BYTES
        hashes = np.unique(row_hashes(rows)) if small else None
        return cls(key, seed, len(rows), hashes)

    @classmethod
    def read(cls, folder: str | Path | None) -> TrainedRows | None:
        """Of a saved model; None if it does not say."""
        path = Path(folder or "") / FACTS
        if not path.is_file():
            return None
        facts = json.loads(path.read_text(encoding="utf-8"))
        kept = path.with_name(HASHES)
        hashes = np.load(kept, allow_pickle=False) if kept.is_file() else None
        return cls(facts["train_key"], facts["seed"], facts["train_rows"], hashes)

    def save_pretrained(self, folder: str | Path) -> None:
        """Beside the weights of the model."""
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
        """How many of `rows` were trained on; None if that is not known."""
        if self.hashes is None:
            return None
        return int(np.isin(row_hashes(rows), self.hashes).sum())


def row_hashes(rows: SplitRows) -> Hashes:
    """(N,) of what the model is given of each row, labels left out; of joined texts
    (documents,), of images that are files of these."""
    if "encoded" in rows.column_names:
        files = rows.table.column("encoded")
        views: Iterator[Any] = (file.as_buffer() for file in files)
    else:
        parts, numbers = rows.sequences(np.arange(len(rows)))
        views = map(np.ascontiguousarray, _views(parts, numbers))
    return np.array([xxhash.xxh3_64_intdigest(view) for view in views], np.uint64)


def _views(parts: Any, numbers: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    for start in range(0, len(numbers), ROWS_AT_ONCE):
        yield from parts.views(numbers[start : start + ROWS_AT_ONCE])
