"""Read rows whose split is given by their catalog entry or by a column."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.engine.data.column_checks import Faults, named, valid_utf8
from flatout.engine.data.raw_texts import SPLITS, RawBatch, RawTexts, RawTextsError

SPLIT_CODES = {
    **dict.fromkeys(("train", "training"), 0),
    **dict.fromkeys(("validation", "valid", "val", "dev", "development"), 1),
    **dict.fromkeys(("eval", "evaluation"), 1),
    **dict.fromkeys(("test", "testing"), 2),
}
"""Maps common names of splits to the index of the split in SPLITS."""


@dataclass(frozen=True)
class SplitTexts:
    """Raw rows of splits that the user provides, combined into one source."""

    parts: Mapping[str, RawTexts]
    """The raw texts of each split, by split name. `train` is always included."""

    @property
    def column_names(self) -> list[str]:
        """Column names of the train split."""
        return self.parts["train"].column_names

    def batches(self, columns: Sequence[str]) -> Iterator[RawBatch]:
        """Yield the rows of all splits. The source of rows is `<split>/<file>`."""
        for name, part in self.parts.items():
            for batch in part.batches(columns):
                own = batch.source == entry_of(name)
                source = name if own else f"{name}/{batch.source}"
                yield replace(batch, source=source, split=SPLIT_CODES[name])

    def digest(self, columns: Sequence[str]) -> str:
        """Return a digest of the names and rows of all splits."""
        found = {name: part.digest(columns) for name, part in self.parts.items()}
        return json.dumps(found, sort_keys=True)


def entry_of(split: str) -> str:
    """Return the name of the catalog entry for a split that the user provides."""
    return f"raw_{split}_texts"


def named_splits(splits: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return `splits` with their names changed to train, validation and test. `name` is
    the name of the catalog entry. Raises RawTextsError if the name of a split is
    unknown, if two names mean the same split, or if train is missing."""
    known = [key for key in splits if key.lower() in SPLIT_CODES]
    named = {SPLITS[SPLIT_CODES[key.lower()]]: splits[key] for key in known}
    if len(named) == len(splits) and "train" in named:
        return {key: named[key] for key in SPLITS if key in named}
    raise RawTextsError(
        f"{name} has the splits {', '.join(splits)}: train must be one of them, and "
        "validation and test the others, each once. Name one split in the catalog, "
        f"join them (split: {'+'.join(splits)}; under load_args if the entry is a "
        "huggingface one), or give each an entry: raw_train_texts, "
        "raw_validation_texts, raw_test_texts"
    )


def read_splits(batch: RawBatch, name: str, faults: Faults) -> npt.NDArray[np.int8]:
    """Return the index in SPLITS for each value of a column of split names (N,). Rows
    with an unknown name are rejected and have the index -1."""
    array = valid_utf8(named(batch.columns[name]), name, faults)
    names = [None if value is None else str(value) for value in array.to_pylist()]
    codes = [SPLIT_CODES.get((value or "").strip().lower(), -1) for value in names]
    found = np.array(codes, np.int8)
    faults.add(name, array.is_null(), "is missing")
    faults.add(name, found < 0, "must be train, validation (val, dev, eval) or test")
    return found
