"""Several columns of 0 and 1 as one list of labels: the names of those with a 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.data.column_checks import (
    Check,
    is_text,
    mask_of,
    named,
    read_number,
    valid_utf8,
)
from flatout.engine.data.raw_texts import RawBatch
from flatout.engine.files.content_key import plain_values


def read_flags(
    batch: RawBatch, names: Sequence[str]
) -> tuple[Any, list[tuple[str, Check]]]:
    """Return lists (N,) of names, and errors by column."""
    checks: list[tuple[str, Check]] = []
    flags = np.zeros((len(batch.rows), len(names)), bool)
    for at, name in enumerate(names):
        numbers = read_number(_with_digits(batch, name), name)[0].to_numpy(False)
        missing = mask_of(named(batch.columns[name]).is_null())
        odd = (numbers != 0) & (numbers != 1)
        checks += [
            (name, (missing, f"{name} is missing")),
            (name, (odd, f"{name} is neither 0 nor 1")),
        ]
        flags[:, at] = numbers == 1
    offsets = np.concatenate([[0], np.cumsum(flags.sum(1))]).astype(np.int32)
    chosen = pa.array(names, pa.string()).take(pa.array(np.nonzero(flags)[1]))
    return pa.ListArray.from_arrays(pa.array(offsets), chosen), checks


def _with_digits(batch: RawBatch, name: str) -> RawBatch:
    """Replace the words true and false, which pandas writes to CSV, with 1 and 0."""
    array = plain_values(batch.columns[name])
    if not is_text(array.type):
        return batch
    words = pc.utf8_lower(valid_utf8(array)[0])
    array = pc.if_else(pc.equal(words, "true"), "1", words)
    array = pc.if_else(pc.equal(words, "false"), "0", array)
    return replace(batch, columns={**batch.columns, name: array})
