"""Keys of stored results, so that stale data is never mistaken for current data.

A :class:`ContentKey` contains all inputs of a stored result, such as the rows, the
tokenizer file, the options and the version of the code. The key is stored with the
result. Equal keys mean equal results, and differing fields explain why a result is
rebuilt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

FILES, STATE = "files", "files_state"
"""Fields of a FilesKey: digests of the files' bytes, and of sizes, times and inodes."""


@dataclass(frozen=True)
class ContentKey:
    """The named inputs of a result. The values are JSON values."""

    fields: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Order-independent hash (32 hex digits) of all fields except STATE."""
        fields = {name: v for name, v in self.stored().items() if name != STATE}
        text = json.dumps(fields, sort_keys=True, ensure_ascii=False)
        return xxhash.xxh3_128_hexdigest(text.encode())

    def stored(self) -> dict[str, Any]:
        """Return all fields in the form in which they are stored with a result."""
        return dict(self.fields)

    def describes(self, stored: ContentKey) -> bool:
        """Return whether the result with the key `stored` has the same inputs."""
        return self.digest == stored.digest

    def changes_since(self, stored: ContentKey) -> list[str]:
        """Return a text such as `max_length: 320 -> 128` for each field that differs
        from the key `stored`. Digests and long values are not shown: the text is then
        `rows: changed`, for example."""
        now, then = self.stored(), stored.stored()
        names = sorted({*now, *then} - {STATE})
        pairs = {name: (_shown(then, name), _shown(now, name)) for name in names}
        return [
            f"{name}: {'changed' if _is_unreadable(then, now) else f'{then} -> {now}'}"
            for name, (then, now) in pairs.items()
            if then != now
        ]


LONGEST_SHOWN, CHUNK_BYTES = 100, 1 << 24


def _is_unreadable(then: str, now: str) -> bool:
    """Return whether one of the values is a digest, or both are too long to show."""
    has_digest = any(re.search(r'"[0-9a-f]{32}"', text) for text in (then, now))
    return has_digest or len(then) + len(now) > LONGEST_SHOWN


def _shown(fields: Mapping[str, Any], name: str) -> str:
    return json.dumps(fields[name], ensure_ascii=False) if name in fields else "absent"


def file_hash(path: Path) -> str:
    """Return a file's xxh3 hash (32 hex digits). The hash detects accidental
    corruption, but not tampering."""
    return files_hash("", [("", path)])


def files_hash(start: str, files: Iterable[tuple[str, Path]]) -> str:
    """Return the xxh3 hash of the text `start` and of a heading and the bytes of each
    file."""
    state = xxhash.xxh3_128(start.encode())
    for heading, path in files:
        state.update(heading.encode())
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                state.update(chunk)
    return state.hexdigest()


def arrow_digest(batches: Iterable[Any]) -> str:
    """Return a digest of the rows in record batches or tables, however they are divided
    into batches: a slice, a copy and a memory-mapped file have the same digest."""
    digest = ArrowDigest()
    for batch in batches:
        digest.update(batch)
    return digest.hexdigest()


class ArrowDigest:
    """Computes a digest of rows that arrive in batches."""

    def __init__(self) -> None:
        self._columns: dict[str, _ColumnDigest] = {}

    def update(self, batch: Any) -> None:
        """Add a record batch or a table."""
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            digest = self._columns.setdefault(name, _ColumnDigest())
            chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
            for chunk in chunks:
                digest.update(chunk)

    def hexdigest(self) -> str:
        parts = {name: c.hexdigest() for name, c in sorted(self._columns.items())}
        return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())


BYTES = (pa.StringArray, pa.LargeStringArray, pa.BinaryArray, pa.LargeBinaryArray)


class _ColumnDigest:
    """Hashes the nulls, the lengths and the values of a column as separate streams."""

    def __init__(self) -> None:
        self._rows = 0
        self._nulls = xxhash.xxh3_128()
        self._lengths = xxhash.xxh3_128()
        self._values = xxhash.xxh3_128()
        self._items: _ColumnDigest | None = None

    def update(self, array: Any) -> None:
        array = plain_values(array)
        if array.null_count:
            nulls = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
            self._nulls.update((nulls + self._rows).astype(np.int64).tobytes())
        self._rows += len(array)
        array = array.drop_null() if array.null_count else array
        kind, unlike_lists = array.type, (pa.StructArray, pa.MapArray, pa.UnionArray)
        if pa.types.is_nested(kind) and not isinstance(array, unlike_lists):
            self._add_lengths(pc.list_value_length(array))
            self._items = self._items or _ColumnDigest()
            self._items.update(array.flatten())
        elif isinstance(array, BYTES):
            self._add_lengths(pc.binary_length(array))
            self._values.update(_bytes_of(array))
        elif pa.types.is_primitive(kind) and not pa.types.is_interval(kind):
            if pa.types.is_temporal(kind):
                array = array.view(pa.int64() if kind.bit_width > 32 else pa.int32())
            self._values.update(np.ascontiguousarray(array.to_numpy(False)).data)
        else:  # The values are not stored in one buffer.
            for value in array.to_pylist():
                self._values.update(f"{value!r}\0".encode(errors="backslashreplace"))

    def _add_lengths(self, lengths: Any) -> None:
        self._lengths.update(lengths.to_numpy(False).astype(np.int64).tobytes())

    def hexdigest(self) -> str:
        parts = [self._rows, self._nulls.hexdigest(), self._lengths.hexdigest()]
        items = self._items.hexdigest() if self._items else ""
        return json.dumps([*parts, self._values.hexdigest(), items])


def plain_values(array: Any) -> Any:
    """Return a dictionary, run-end encoded, extension or view array as an Arrow array
    of plain values. Other arrays are returned unchanged."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_run_end_encoded(array.type):
        array = pc.run_end_decode(array)
    if isinstance(array.type, pa.ExtensionType):
        array = array.storage
    if pa.types.is_string_view(array.type):
        return array.cast(pa.large_string())
    if pa.types.is_binary_view(array.type):
        return array.cast(pa.large_binary())
    return array


def _bytes_of(array: Any) -> memoryview:
    """Return the concatenated bytes of all values without copying them."""
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offset_buffer, value_buffer = array.buffers()
    if value_buffer is None or not len(array):
        return memoryview(b"")
    offsets = np.frombuffer(offset_buffer, np.int64 if wide else np.int32)
    start, stop = offsets[array.offset], offsets[array.offset + len(array)]
    return memoryview(value_buffer)[start:stop]
