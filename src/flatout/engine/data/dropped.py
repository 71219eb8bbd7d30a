"""Leave out the rows in `split.drop_rows`, given by row number or text hash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import xxhash

from flatout.engine.data.row_facts import DROPPED, TEXT_HASH, Codes, Hashes, RowFacts
from flatout.engine.parameters import SettingsError
from flatout.engine.parameters.faults import first_line

Given = Sequence[int] | str
KNOWN = 0.5
"""At least this fraction of the rows in a file of dropped rows must occur in the raw
data."""


def drop_key(given: Given) -> Any:
    """Return the entry of a content key for `given` (`split.drop_rows`). Raises
    SettingsError if `given` is a file that cannot be read."""
    if isinstance(given, str):
        return xxhash.xxh3_128_hexdigest(np.sort(_hashes(given)).tobytes())
    return sorted(given)


def drop(codes: Codes, facts: RowFacts, given: Given, raw_name: str) -> None:
    """Set the code in `codes` (N,) of each row listed in `given` (`split.drop_rows`) to
    DROPPED. If `given` is a file, only rows of the train split are dropped. Raises
    SettingsError if the data does not contain the listed rows."""
    if not isinstance(given, str):
        codes[np.isin(facts.rows, _numbers(facts, given, raw_name))] = DROPPED
        return
    hashes, known = _hashes(given), facts.exact[:, 0]
    found = int(np.isin(hashes, known).sum())
    if found < KNOWN * len(hashes):
        raise SettingsError(
            f"split.drop_rows: {given} belongs to other data: {raw_name} has the texts "
            f"of {found} of its {len(hashes)} rows. Name the file of an audit of this "
            "data, or numbers of rows"
        )
    codes[np.isin(known, hashes) & (codes == 0)] = DROPPED


def _numbers(facts: RowFacts, given: Sequence[int], raw: str) -> npt.NDArray[np.int64]:
    if len(facts.source_names) > 1:
        raise SettingsError(
            f"split.drop_rows: {raw} has several files, so that numbers do not name "
            "rows: name the suspect_rows.parquet of an audit of texts, or remove the "
            "rows from the files"
        )
    numbers = np.array(given, np.int64)
    if len(outside := numbers[numbers >= facts.num_raw]):
        raise SettingsError(
            f"split.drop_rows: there is no row {outside[0]}; {raw} has the rows 0 to "
            f"{facts.num_raw - 1}"
        )
    return numbers


def _hashes(path: str) -> Hashes:
    try:
        found = pq.read_table(path, columns=[TEXT_HASH]).column(TEXT_HASH)
        hashes: Hashes = found.to_numpy().astype(np.uint64)
        return hashes
    except (OSError, KeyError, ValueError) as error:
        raise SettingsError(
            f"split.drop_rows: {path} cannot be read ({type(error).__name__}: "
            f"{first_line(error)}): name the suspect_rows.parquet of an audit of "
            f"texts, which has the column {TEXT_HASH}, or numbers of raw rows"
        ) from error
