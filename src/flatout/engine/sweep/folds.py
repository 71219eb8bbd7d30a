"""Write the rows of each cross-validation fold as the input files of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from flatout.engine.launch.job_files import JobFiles, folders_of, token_key
from flatout.engine.parameters import SettingsError
from flatout.engine.rows.rows import open_rows
from flatout.engine.sweep.space import FOLD


def fold_files(
    files: JobFiles, splits: Sequence[Any], folds: int | None, folder: Path
) -> list[JobFiles]:
    """Write the rows of each of the `folds` training runs below `folder`, and return
    their JobFiles. `files` describes the original token rows. The rows of the fold are
    the test split. The others stay in the validation or the train split. `splits` are
    the texts of the three splits, each a `datasets.Dataset` with a column `fold`.
    Raises SettingsError if the column does not contain `folds` folds, or if token rows
    and texts do not match one to one."""
    has_folds = all(FOLD in split.column_names for split in splits)
    fold = np.concatenate([split[FOLD][:] if has_folds else [-1] for split in splits])
    known = int(fold.max()) + 1
    if known != folds:
        raise SettingsError(
            f"split.folds is {folds or 'null'}, and the rows have {known or 'no'} "
            "folds: kedro run --pipelines=split,tokenize,crossvalidate "
            f"--params=split.folds={folds or known or 5}"
        )
    opened: list[Any] = [open_rows(Path(place)) for place in files.splits.values()]
    sizes = [len(rows) for rows in opened]
    if sizes != [len(split) for split in splits]:
        raise SettingsError(
            "split.folds needs a token row for each text: set tokenize.join_texts to "
            "false, and run kedro run --pipelines=split,tokenize again"
        )
    kind, table = type(opened[0]), pa.concat_tables([rows.table for rows in opened])
    regular, found = np.repeat([0, 1, 0], sizes), []
    for number in range(known):
        place = np.where(fold == number, 2, regular)  # 0 is train, 1 validation, 2 test
        tables = (table.filter(pa.array(place == split)) for split in range(3))
        rows = dict(zip(files.splits, map(kind, tables), strict=True))
        folders = folders_of(rows, folder / f"fold_{number + 1}")
        found.append(replace(files, splits=folders, data_key=token_key(rows["train"])))
    return found
