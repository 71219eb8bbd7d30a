"""Lines of a file for numbers of rows: looked up only where there is something to say,
so that rows which can be used cost nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa

from flatout.engine.data.raw_texts import SOURCE, RawTexts

RowNumber = tuple[str, int]
"""A row's source, and its number there."""
Lines = Mapping[RowNumber, int]
"""The first line of rows; of files of lines alone."""


def find_lines(raw: RawTexts, wanted: Iterable[RowNumber]) -> Lines:
    """Reads each file that has `wanted` rows as far as the last of them."""
    rows_of: dict[str, set[int]] = {}
    for source, row in wanted:
        rows_of.setdefault(source, set()).add(row)
    # A reader of the user's own may know no lines.
    line_numbers = getattr(raw, "line_numbers", lambda source: None)
    found: dict[RowNumber, int] = {}
    for source, rows in rows_of.items():
        lines = lines_of(line_numbers(source), sorted(rows))
        found |= {(source, row): line for row, line in lines.items()}
    return found


def lines_of(numbers: Iterator[int] | None, rows: Sequence[int]) -> dict[int, int]:
    """Line of each of `rows` (sorted), by the lines of all rows in turn."""
    found: dict[int, int] = {}
    ahead = 0
    for row in rows if numbers else ():
        line = next(islice(numbers, row - ahead, None), None)  # type: ignore[arg-type]
        if line is None:
            return {}
        found[row], ahead = line, row + 1
    return found


def row_numbers(rejected: Any) -> list[RowNumber]:
    """Of a table of rejected rows."""
    columns = (rejected.column(name).to_pylist() for name in ("source", "row"))
    return list(zip(*columns, strict=True))


def with_lines(rejected: Any, found: Lines) -> Any:
    """A table of rejected rows with their lines. A row that is there several times
    stands for as many lines of the file, one after another."""
    ahead = dict(found)
    lines = []
    for key in row_numbers(rejected):
        lines.append(ahead.get(key))
        if key in ahead:
            ahead[key] += 1
    place = rejected.schema.get_field_index("line")
    return rejected.set_column(place, "line", pa.array(lines, pa.int64()))


def named_place(key: RowNumber, found: Lines) -> str:
    """`line reviews.csv:39`, or `row 5`."""
    line = found.get(key)
    return f"{'row' if line is None else 'line'} {place(*key, line)}"


def place(source: str, row: int, line: int | None) -> str:
    """Number of the line, or of the row, with the name of the file it is in."""
    number = row if line is None else line
    return str(number) if source == SOURCE else f"{source}:{number}"
