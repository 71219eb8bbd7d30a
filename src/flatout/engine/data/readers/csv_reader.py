"""Read CSV files. All values are read as text, so that NA, null and nan are not treated
as missing and the label 007 stays 007. Rows with a wrong number of fields are
reported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from flatout.engine.data.raw_texts import BrokenRow, RawBatch, RawTextsError
from flatout.engine.data.readers.file_reader import FileReader, Utf8

# pyarrow.dataset is not used because it does not number rows that cannot be parsed.

BLOCK_BYTES = 64 << 20
"""Maximum size of a row in bytes."""
HEAD_BYTES = 64 << 10
"""Number of bytes first searched for the header, to avoid reading the whole file."""
_TOO_LONG = (
    f"a row is longer than {BLOCK_BYTES >> 20} MiB. Is a quote never closed? "
    "Rows of this length can be given as JSON lines or Parquet"
)


class CsvReader(FileReader):
    def column_names(self) -> list[str]:
        with self.errors("is it really a CSV file?"):
            try:
                _, found = self._parse([], [], HEAD_BYTES)
            except pa.ArrowInvalid:  # The first row may be longer than HEAD_BYTES.
                _, found = self._parse([], [], BLOCK_BYTES)
        names = list(found.schema.names)
        if names and names[0].strip().lower().startswith("sep="):
            raise RawTextsError(
                f"{self.path} begins with Excel's line {names[0]!r}: remove that "
                "line, and name the delimiter in the catalog"
            )
        return names

    def batches(self, columns: list[str]) -> Iterator[RawBatch]:
        broken: list[BrokenRow] = []
        start, last, sent = 0, None, 0
        with self.errors("is it really a CSV file?"):
            stream, found = self._parse(columns, broken, BLOCK_BYTES)
            for batch in found:
                rows, start = _rows_between(start, batch.num_rows, broken)
                arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
                before = [fault for fault in broken[sent:] if fault.row < start]
                yield RawBatch(self.source, rows, arrays, broken=before)
                sent += len(before)
                last = batch if batch.num_rows else last
        if stream.marks % 2:
            self._check_last_quote(last, broken, start)
        if broken[sent:]:
            nothing = {name: pa.array([], pa.string()) for name in columns}
            rows = np.empty(0, np.int64)
            yield RawBatch(self.source, rows, nothing, broken=broken[sent:])

    @property
    def delimiter(self) -> str:
        suffixes = [suffix.lower() for suffix in self.path.suffixes]
        is_tab = ".tsv" in suffixes and self.form.delimiter == ","
        return "\t" if is_tab else self.form.delimiter

    def _parse(
        self, columns: list[str], broken: list[BrokenRow], block_bytes: int
    ) -> tuple[Utf8, Any]:
        quote, names = self.form.quote_char, self.form.column_names
        stream = self.utf8(mark=quote or "")
        found = pacsv.open_csv(
            stream.stream,
            read_options=pacsv.ReadOptions(
                use_threads=False,  # Otherwise, pyarrow does not number broken rows.
                block_size=block_bytes,
                column_names=list(names) if names else None,
            ),
            parse_options=pacsv.ParseOptions(
                delimiter=self.delimiter,
                quote_char=quote if quote else False,
                newlines_in_values=bool(quote),
                invalid_row_handler=lambda row: self._note(row, broken),
            ),
            convert_options=pacsv.ConvertOptions(
                strings_can_be_null=False,
                include_columns=columns,
                column_types=dict.fromkeys(columns, pa.string()),
            ),
        )
        return stream, found

    def fail(self, error: Exception, advice: str) -> RawTextsError:
        is_long = "straddling" in str(error)
        return super().fail(error, _TOO_LONG if is_long else advice)

    def _check_last_quote(
        self, last: Any, broken: list[BrokenRow], num_rows: int
    ) -> None:
        """Raise RawTextsError if a quote is still open at the end of the file."""
        values = [] if last is None else [c[-1].as_py() or "" for c in last.columns]
        swallowed = [value for value in values if "\n" in value]
        if broken and broken[-1].row >= num_rows - 1 and broken[-1].lines > 1:
            row = broken[-1].row
            head = next(fault.excerpt for fault in broken if fault.row == row)
        elif swallowed:
            row, head = num_rows - 1, swallowed[0].splitlines()[0][:80]
        else:
            return
        raise RawTextsError(
            f"{self.path}: the quote opened in row {row} ({head!r}) is never closed, "
            "so the rest of the file was read as part of that row. Close it, write "
            'a quote inside a text twice (""), or set quote_char: null for '
            "raw_texts in the catalog"
        )

    def _note(self, row: Any, broken: list[BrokenRow]) -> str:
        """Append a row with a wrong number of fields to `broken`, one BrokenRow per
        line of the row. Return "skip", which tells pyarrow to continue."""
        # str.splitlines also splits at U+2028, for example, which does not end a row.
        lines = re.split(r"\r\n|\r|\n", row.text)
        reason = f"{row.actual_columns} fields instead of {row.expected_columns}"
        if len(lines) > 1:
            reason += " (a quote over several lines: is it closed?)"
        # pyarrow counts rows from 1 and includes the header if there is one.
        number = row.number - (1 if self.form.column_names else 2)
        broken += [BrokenRow(number, reason, line[:80], len(lines)) for line in lines]
        return "skip"


def _rows_between(start: int, count: int, broken: list[BrokenRow]) -> tuple[Any, int]:
    """Return the numbers of `count` parsed rows from `start`, without the numbers of
    broken rows, and the number of the row that follows."""
    gaps = sorted({fault.row for fault in broken if fault.row >= start})
    candidates = np.arange(start, start + count + len(gaps))
    rows = candidates[~np.isin(candidates, gaps)][:count]
    return rows, int(rows[-1]) + 1 if count else start
