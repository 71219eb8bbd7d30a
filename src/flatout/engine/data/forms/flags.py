"""Several columns of 0 and 1 as one list of labels: the names of those with a 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from flatout.engine.data.column_checks import Check, mask_of, named, read_number
from flatout.engine.data.raw_texts import RawBatch


def read_flags(
    batch: RawBatch, names: Sequence[str]
) -> tuple[Any, list[tuple[str, Check]]]:
    """Lists (N,) of names, and what is wrong by column."""
    checks: list[tuple[str, Check]] = []
    flags = np.zeros((len(batch.rows), len(names)), bool)
    for at, name in enumerate(names):
        numbers = read_number(batch, name)[0].to_numpy(zero_copy_only=False)
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
