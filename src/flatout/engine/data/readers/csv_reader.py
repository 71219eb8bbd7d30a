"""CSV files. Every value is text: NA, null and nan are not missing, a label 007 stays
007. Rows with a wrong number of fields are reported, not skipped in silence."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from flatout.engine.data.raw_texts import BrokenRow, RawBatch, RawTextsError
from flatout.engine.data.readers.file_reader import FileReader
from flatout.engine.data.readers.row_lines import lines_of

# Arrow cuts the rows; its own reader of files (pyarrow.dataset) numbers no bad rows.

BLOCK_BYTES = 64 << 20
"""Longest row that can be read, bytes."""
HEAD_BYTES = 64 << 10
"""Where the header is looked for first: to open a file must not be to read it."""
_TOO_LONG = (
    f"a row is longer than {BLOCK_BYTES >> 20} MiB. Is a quote never closed? "
    "Rows so long can be given as JSON lines or Parquet"
)


@contextmanager
def _undecoded_rows() -> Iterator[list[BaseException]]:
    """Of rows with a wrong number of fields, which Arrow hands over as text: it prints
    what it cannot decode, and goes on to say that the row is no CSV."""
    found: list[BaseException] = []
    shown = sys.unraisablehook

    def hook(error: Any) -> None:
        if isinstance(error.exc_value, UnicodeDecodeError):
            found.append(error.exc_value)
        else:
            shown(error)

    sys.unraisablehook = hook
    try:
        yield found
    finally:
        sys.unraisablehook = shown


class CsvReader(FileReader):
    def column_names(self) -> list[str]:
        return self._names(keep_empty=False)

    def _names(self, keep_empty: bool) -> list[str]:
        with self._errors():
            with self.open() as stream:
                head = stream.read(HEAD_BYTES)
            if b"\n" in head:
                with suppress(
                    pa.ArrowInvalid, UnicodeDecodeError
                ):  # cut in a character
                    return self._names_in(pa.BufferReader(head), keep_empty)
            return self._names_in(self.open(), keep_empty)

    def _names_in(self, stream: Any, keep_empty: bool) -> list[str]:
        return list(self._parse(stream, [], [], keep_empty).schema.names)

    @cached_property
    def _keep_empty(self) -> bool:
        """Whether an empty line is a row: in a file of one column it cannot be told
        from an empty value. Not where one stands before the header."""
        names = self._names(keep_empty=False)
        return len(names) == 1 and self._names(keep_empty=True) == names

    def batches(self, columns: list[str]) -> Iterator[RawBatch]:
        broken: list[BrokenRow] = []
        start, last, told = 0, None, 0
        stream = _Counted(self.open(), (self.form.quote_char or "").encode())
        for batch in self._batches(stream, columns, broken):
            rows, start = _rows_between(start, batch.num_rows, broken)
            arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
            before = [fault for fault in broken[told:] if fault.row < start]
            yield RawBatch(self.source, rows, arrays, broken=before)
            told += len(before)
            last = batch if batch.num_rows else last
        if stream.count % 2:
            self._check_last_quote(last, broken, start)
        if broken[told:]:
            nothing = {name: pa.array([], pa.string()) for name in columns}
            rows = np.empty(0, np.int64)
            yield RawBatch(self.source, rows, nothing, broken=broken[told:])

    def line_numbers(self) -> Iterator[int]:
        """As Python's reader of CSV counts them, which cuts rows as Arrow's does."""
        starts = self._record_starts()
        next(starts, None)  # the header
        yield from starts

    def _record_starts(self) -> Iterator[int]:
        encoding, start = self.form.encoding, 1
        if self.form.arrow_encoding == "utf8":
            encoding = "utf-8-sig"
        quote = self.form.quote_char or None
        limit = csv.field_size_limit(BLOCK_BYTES)
        try:
            stream = io.TextIOWrapper(self.open(), encoding, "replace", newline="")
            records = csv.reader(
                stream,
                delimiter=self._delimiter,
                quotechar=quote,
                quoting=csv.QUOTE_MINIMAL if quote else csv.QUOTE_NONE,
            )
            for record in records:
                if record or self._keep_empty:
                    yield start
                start = records.line_num + 1
        except csv.Error:  # a quote that is never closed: no row is behind it
            yield start
        finally:
            csv.field_size_limit(limit)

    @property
    def _delimiter(self) -> str:
        suffixes = [suffix.lower() for suffix in self.path.suffixes]
        is_tab = ".tsv" in suffixes and self.form.delimiter == ","
        return "\t" if is_tab else self.form.delimiter

    def _batches(
        self, stream: Any, columns: list[str], broken: list[BrokenRow]
    ) -> Iterator[Any]:
        with self._errors():
            keep_empty = self._keep_empty
            yield from self._parse(stream, columns, broken, keep_empty)

    def _parse(
        self,
        stream: Any,
        columns: list[str],
        broken: list[BrokenRow],
        keep_empty: bool,
    ) -> Any:
        quote = self.form.quote_char
        return pacsv.open_csv(
            stream,
            read_options=pacsv.ReadOptions(
                use_threads=False,  # or rows that are not cut out have no number
                block_size=BLOCK_BYTES,
                encoding=self.form.arrow_encoding,
            ),
            parse_options=pacsv.ParseOptions(
                delimiter=self._delimiter,
                quote_char=quote if quote else False,
                newlines_in_values=bool(quote),
                ignore_empty_lines=not keep_empty,
                invalid_row_handler=lambda row: _note(row, broken),
            ),
            convert_options=pacsv.ConvertOptions(
                strings_can_be_null=False,
                include_columns=columns,
                column_types=dict.fromkeys(columns, pa.string()),
            ),
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with _undecoded_rows() as undecoded:
                yield
        except UnicodeDecodeError as error:
            raise self.bad_encoding() from error
        except pa.ArrowInvalid as error:
            if undecoded or "UTF8" in str(error):
                raise self.bad_encoding() from error
            too_long = "straddling" in str(error)
            advice = _TOO_LONG if too_long else "is it really a CSV file?"
            raise self.fail(error, advice) from error

    def _check_last_quote(
        self, last: Any, broken: list[BrokenRow], num_rows: int
    ) -> None:
        """A quote that is never closed takes the rest of the file into one value."""
        values = [] if last is None else [c[-1].as_py() or "" for c in last.columns]
        swallowed = [value for value in values if "\n" in value]
        if broken and broken[-1].row >= num_rows - 1 and broken[-1].lines > 1:
            row = broken[-1].row
            head = next(fault.excerpt for fault in broken if fault.row == row)
        elif swallowed:
            row, head = num_rows - 1, swallowed[0].splitlines()[0][:80]
        else:
            return
        line = lines_of(self.line_numbers(), [row]).get(row)
        raise RawTextsError(
            f"{self.path}: the quote opened in line {line} ({head!r}) is never closed, "
            "so the rest of the file was read as part of that row. Close it, write "
            'a quote inside a text twice (""), or set quote_char: null for '
            "raw_texts in the catalog"
        )


def _note(row: Any, broken: list[BrokenRow]) -> str:
    """Keep a row with a wrong number of fields; a line of the file each."""
    # Python's splitlines also cuts at U+2028 and others, which end no row.
    lines = re.split(r"\r\n|\r|\n", row.text)
    reason = f"{row.actual_columns} fields where {row.expected_columns} are expected"
    if len(lines) > 1:
        reason += " (a quote over several lines: is it closed?)"
    number = row.number - 2  # counted from 1, with the header
    broken += [BrokenRow(number, reason, line[:80], len(lines)) for line in lines]
    return "skip"


def _rows_between(start: int, count: int, broken: list[BrokenRow]) -> tuple[Any, int]:
    """Numbers (count,) of rows from `start` on that are not broken; and the next."""
    gaps = sorted({fault.row for fault in broken if fault.row >= start})
    candidates = np.arange(start, start + count + len(gaps))
    rows = candidates[~np.isin(candidates, gaps)][:count]
    return rows, int(rows[-1]) + 1 if count else start


class _Counted:
    """A stream, and how often a mark was read from it."""

    closed = False

    def __init__(self, stream: Any, mark: bytes) -> None:
        self._stream, self._mark, self.count = stream, mark, 0

    def read(self, size: int) -> bytes:
        data: bytes = self._stream.read(size)
        self.count += data.count(self._mark) if self._mark else 0
        return data

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._stream.close()
