"""JSON lines: one object a line. A bad line costs only itself, and is reported."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.json as pajson

from flatout.engine.data.raw_texts import (
    BrokenRow,
    RawBatch,
    RawTextsError,
    column_of_mixed,
)
from flatout.engine.data.readers.file_reader import FileReader

# Arrow reads good blocks; where a line is bad it says neither which nor why.

BLOCK_BYTES = 16 << 20
HEAD_BYTES = 64 << 10
"""Read at a time where only names of columns are looked for."""
LINE_BYTES = 64 << 20
"""A line is held in memory up to this size, and one that goes on is rejected."""
_NAMING_LINES = 100
"""The first lines say which columns there are."""


class _LongLine(NamedTuple):
    """A line of more than LINE_BYTES, of which only the beginning is kept."""

    head: bytes


_Block = bytes | _LongLine
"""Whole lines, without the last newline."""


class JsonReader(FileReader):
    def column_names(self) -> list[str]:
        names: dict[str, None] = {}
        blocks = self._blocks(min(HEAD_BYTES, BLOCK_BYTES))
        lines = (line for block in blocks for line in _lines(block))
        for number, line in enumerate(lines):
            if number == 0 and line.lstrip()[:1] == b"[":
                raise RawTextsError(
                    f"{self.path} is one JSON array; give one object a line (JSON "
                    "lines), or use pandas.JSONDataset in the catalog"
                )
            if number >= _NAMING_LINES and names:
                break
            value = _parsed(line)
            names.update(dict.fromkeys(value if isinstance(value, dict) else ()))
        return list(names)

    def line_numbers(self) -> Iterator[int]:
        number = 1
        for block in self._blocks():
            for line in _lines(block):
                if line.strip() or isinstance(block, _LongLine):
                    yield number
                number += 1

    def batches(self, columns: list[str]) -> Iterator[RawBatch]:
        start = 0
        for block in self._blocks():
            if isinstance(block, _LongLine):
                batch = self._too_long(block, columns, start)
            else:
                fast = self._fast(block, columns, start)
                batch = fast or self._slow(block, columns, start)
            start += len(batch.rows) + len(batch.broken)
            yield batch

    def _blocks(self, block_bytes: int | None = None) -> Iterator[_Block]:
        """About `block_bytes` at a time, as UTF-8 without BOM."""
        try:
            yield from self._decoded_blocks(block_bytes or BLOCK_BYTES)
        except UnicodeDecodeError as error:
            raise self.bad_encoding() from error

    def _decoded_blocks(self, block_bytes: int) -> Iterator[_Block]:
        encoding = self.form.arrow_encoding
        stream = self.open()
        if encoding != "utf8":
            stream = pa.transcoding_input_stream(stream, encoding, "utf8")
        rest = stream.read(3).removeprefix(codecs.BOM_UTF8)
        while block := stream.read(block_bytes):
            head, newline, rest = (rest + block).rpartition(b"\n")
            if newline:
                yield head
            if len(rest) > LINE_BYTES:
                yield _LongLine(rest[:80])
                rest = _behind_the_line(stream)
        if rest.strip():
            yield rest

    def _too_long(self, line: _LongLine, columns: list[str], row: int) -> RawBatch:
        reason = f"a line of more than {LINE_BYTES >> 20} MiB"
        broken = [BrokenRow(row, reason, repr(line.head)[2:-1])]
        nothing = {name: pa.array([], pa.string()) for name in columns}
        return RawBatch(self.source, np.empty(0, np.int64), nothing, broken=broken)

    def _fast(self, block: bytes, columns: list[str], start: int) -> RawBatch | None:
        """By Arrow; None where a line is not as the first one says."""
        first = _parsed(block[: block.find(b"\n") % (len(block) + 1)])
        types = {str: pa.string(), int: pa.int64(), float: pa.float64()}
        if not isinstance(first, dict) or any(
            type(first.get(name)) not in types for name in columns
        ):
            return None
        schema = pa.schema([(name, types[type(first[name])]) for name in columns])
        try:
            table = pajson.read_json(
                pa.BufferReader(block),
                pajson.ReadOptions(block_size=len(block) + 1),
                pajson.ParseOptions(
                    explicit_schema=schema, unexpected_field_behavior="ignore"
                ),
            )
        except pa.ArrowInvalid:
            return None
        arrays = {name: table.column(name).combine_chunks() for name in columns}
        rows = np.arange(start, start + table.num_rows)
        return RawBatch(self.source, rows, arrays)

    def _slow(self, block: bytes, columns: list[str], start: int) -> RawBatch:
        """Line by line, so that a bad one costs only itself."""
        rows, values, broken = [], [], []
        lines = [line for line in block.split(b"\n") if line.strip()]
        for row, line in enumerate(lines, start):
            value = _parsed(line)
            if isinstance(value, dict):
                rows.append(row)
                values.append(value)
            else:
                fault = value if isinstance(value, _Fault) else _Fault()
                shown = f"{fault.detail}{repr(line[:80])[2:-1]}"
                broken.append(BrokenRow(row, fault.reason, shown))
        arrays, kinds = {}, {}
        for name in columns:
            found = [value.get(name) for value in values]
            arrays[name], kinds[name] = column_of_mixed(found)
        return RawBatch(self.source, np.array(rows, np.int64), arrays, kinds, broken)


def _lines(block: _Block) -> list[bytes]:
    return [block.head] if isinstance(block, _LongLine) else block.split(b"\n")


def _behind_the_line(stream: Any) -> bytes:
    """Pass over a line that `stream` is in the middle of; what was read behind it."""
    while block := stream.read(BLOCK_BYTES):
        _, newline, rest = block.partition(b"\n")
        if newline:
            return bytes(rest)
    return b""


class _Fault(NamedTuple):
    """Why a line cannot be used: what is counted, and what is shown of this line."""

    reason: str = "not a JSON object"
    detail: str = ""


def _parsed(line: bytes) -> Any:
    """The JSON value of a line; a _Fault where it has none."""
    try:
        return json.loads(line)
    except UnicodeDecodeError:
        return _Fault("not valid UTF-8")
    except ValueError as error:
        return _Fault("not valid JSON", f"{error}: ")
