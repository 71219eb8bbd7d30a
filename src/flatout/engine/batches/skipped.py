"""Read and check the training rows that a run leaves out (`train.skip_rows`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from flatout.engine.batches.global_batches import GlobalBatches
from flatout.engine.parameters import SettingsError
from flatout.engine.parameters.faults import first_line
from flatout.engine.rows.layout import Ints

COLUMN = "row"


def skipped_rows(given: Sequence[int] | str, num_rows: int) -> Ints:
    """Return the sorted row numbers (N,) of `train.skip_rows`, a list or a file. Raises
    SettingsError if the file cannot be read or a row does not exist."""
    found = _read(Path(given)) if isinstance(given, str) else given
    rows = np.unique(np.array(found, dtype=np.int64))
    outside = rows[(rows < 0) | (rows >= num_rows)]
    if len(outside):
        raise SettingsError(
            f"train.skip_rows: there is no row {outside[0]}; the train rows have the "
            f"numbers 0 to {num_rows - 1}. Were they made again since?"
        )
    return rows


def _read(path: Path) -> Sequence[int]:
    try:
        if path.suffix == ".parquet":
            found = pq.read_table(path, columns=[COLUMN]).column(COLUMN).to_pylist()
        else:
            found = path.read_text(encoding="utf-8").split()
        return [int(number) for number in found]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise SettingsError(
            f"train.skip_rows: {path} cannot be read ({first_line(error)}): name a "
            f"text with a row's number per line, or Parquet with a column {COLUMN}"
        ) from error


def check_skipped(skipped: Ints, batches: GlobalBatches, total_steps: int) -> None:
    """Raise SettingsError if `skipped` (N,) contains all rows of a step."""
    least = batches.num_rows % batches.batch_size or batches.batch_size
    for epoch in range(math.ceil(total_steps / batches.steps_per_epoch)):
        steps, counts = np.unique(batches.steps_of(skipped, epoch), return_counts=True)
        for step in steps[counts >= least].tolist():
            if step < total_steps and counts[steps == step] == len(batches.rows(step)):
                raise SettingsError(
                    f"train.skip_rows leaves no row in step {step + 1}: skip fewer, or "
                    "remove them from the raw data and repeat kedro run"
                )
