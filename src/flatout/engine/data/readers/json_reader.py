"""Read JSON Lines files, which contain one object per line. An invalid line is rejected
and reported without affecting the other lines."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from flatout.engine.data.raw_texts import (
    BrokenRow,
    RawBatch,
    RawTextsError,
    column_of_mixed,
)
from flatout.engine.data.readers.file_reader import FileReader

BLOCK_BYTES = 16 << 20
HEAD_BYTES = 64 << 10
"""Block size in bytes for reading the column names."""
_NAMING_LINES = 100
"""Number of lines at the start of the file whose keys determine the columns."""


class JsonReader(FileReader):
    def column_names(self) -> list[str]:
        names: dict[str, None] = {}
        blocks = self._blocks(min(HEAD_BYTES, BLOCK_BYTES))
        lines = (line for block in blocks for line in _lines(block))
        fault = None
        for number, line in enumerate(lines):
            if number == 0 and line.lstrip()[:1] == b"[":
                raise RawTextsError(
                    f"{self.path} is one JSON array; give one object per line (JSON "
                    "lines). Texts can also be read by pandas.JSONDataset"
                )
            value = _parsed(line)
            if isinstance(value, dict):
                names.update(dict.fromkeys(value))
            elif number == 0:
                fault = value[1]
            if number >= _NAMING_LINES:
                break
        if fault and not names:
            raise RawTextsError(
                f"{self.path}: row 0 is not a JSON object ({fault!r}): give one object "
                "per line, with double quotes and without text between the lines"
            )
        return list(names)

    def batches(self, columns: list[str]) -> Iterator[RawBatch]:
        start = 0
        for block in self._blocks(BLOCK_BYTES):
            batch = self._parsed(block, columns, start)
            start += len(batch.rows) + len(batch.broken)
            yield batch

    def _blocks(self, block_bytes: int) -> Iterator[bytes]:
        """Yield blocks of whole lines, about `block_bytes` each, without a BOM."""
        with self.errors("is it really a file of JSON lines?"):
            stream = self.utf8(keep_bad=True).stream
            rest = stream.read(3).removeprefix(codecs.BOM_UTF8)
            while block := stream.read(block_bytes):
                head, newline, rest = (rest + block).rpartition(b"\n")
                if newline:
                    yield head
            if rest.strip():
                yield rest

    def _parsed(self, block: bytes, columns: list[str], start: int) -> RawBatch:
        """Return the rows of a block as a batch. Rows are numbered from `start`. Each
        line is parsed separately, so that an invalid line does not affect others."""
        rows, values, broken = [], [], []
        for row, line in enumerate(_lines(block), start):
            value = _parsed(line)
            if isinstance(value, dict):
                rows.append(row)
                values.append(value)
            else:
                broken.append(BrokenRow(row, *value))
        arrays, kinds = {}, {}
        for name in columns:
            found = [value.get(name) for value in values]
            arrays[name], kinds[name] = column_of_mixed(found)
        return RawBatch(self.source, np.array(rows, np.int64), arrays, kinds, broken)


def _lines(block: bytes) -> list[bytes]:
    return [line for line in block.split(b"\n") if line.strip()]


def _parsed(line: bytes) -> dict[str, Any] | tuple[str, str]:
    """Return the JSON object in a line, or why it is invalid and an excerpt."""
    reason, detail = "not a JSON object", ""
    try:
        value = json.loads(line)
        if isinstance(value, dict):
            return value
    except UnicodeDecodeError:
        reason = "not valid UTF-8"
    except (ValueError, RecursionError) as error:
        reason, detail = "not valid JSON", f"{error}: "
    return reason, f"{detail}{repr(line[:80])[2:-1]}"
