"""JSON lines: one object a line. A bad line costs only itself, and is reported."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.json as pajson

from flatout.engine.data.file_reader import FileReader
from flatout.engine.data.raw_texts import (
    BrokenRow,
    RawBatch,
    RawTextsError,
    column_of_mixed,
)

BLOCK_BYTES = 16 << 20
_NAMING_LINES = 100
"""The first lines say which columns there are."""


class JsonReader(FileReader):
    def column_names(self) -> list[str]:
        names: dict[str, None] = {}
        lines = next(self._blocks(), b"").splitlines()[:_NAMING_LINES]
        if lines and lines[0].lstrip()[:1] == b"[":
            raise RawTextsError(
                f"{self.path} is one JSON array; give one object a line (JSON lines), "
                "or use pandas.JSONDataset in the catalog"
            )
        for line in lines:
            value = _parsed(line)
            names.update(dict.fromkeys(value if isinstance(value, dict) else ()))
        return list(names)

    def batches(self, columns: list[str]) -> Iterator[RawBatch]:
        start = 0
        for block in self._blocks():
            batch = self._fast(block, columns, start) or self._slow(
                block, columns, start
            )
            start += len(batch.rows) + len(batch.broken)
            yield batch

    def _blocks(self) -> Iterator[bytes]:
        with self.decoding():
            yield from self._decoded_blocks()

    def _decoded_blocks(self) -> Iterator[bytes]:
        """Whole lines, about BLOCK_BYTES at a time, as UTF-8 without BOM."""
        encoding = self.form.arrow_encoding
        stream = self.open()
        if encoding != "utf8":
            stream = pa.transcoding_input_stream(stream, encoding, "utf8")
        rest = stream.read(3).removeprefix(codecs.BOM_UTF8)
        while block := stream.read(BLOCK_BYTES):
            head, newline, tail = (rest + block).rpartition(b"\n")
            rest = tail
            if newline:
                yield head
        if rest.strip():
            yield rest

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
