"""What data was made from, so that stale data is never taken for fresh.

A :class:`ContentKey` names every input of a stored result: the rows, the tokenizer
file, the options, the version of the code. It is stored beside the result; equal
keys mean equal results, and a differing field says why a result is built again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash


@dataclass(frozen=True)
class ContentKey:
    """Named inputs of a result, each a JSON value."""

    fields: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """32 hexadecimal digits over all fields, whatever their order."""
        text = json.dumps(dict(self.fields), sort_keys=True, ensure_ascii=False)
        return xxhash.xxh3_128_hexdigest(text.encode())

    def changes_since(self, stored: ContentKey) -> list[str]:
        """`max_length: 320 -> 128`, one text a field that differs."""
        names = sorted(set(self.fields) | set(stored.fields))
        return [
            f"{name}: {_shown(stored.fields, name)} -> {_shown(self.fields, name)}"
            for name in names
            if _shown(stored.fields, name) != _shown(self.fields, name)
        ]


def _shown(fields: Mapping[str, Any], name: str) -> str:
    return json.dumps(fields[name], ensure_ascii=False) if name in fields else "absent"


def arrow_digest(batches: Iterable[Any]) -> str:
    """Digest of record batches or tables: of the rows, however they are cut.

    A slice, a copy and a memory-mapped file of the same rows agree.
    """
    hashes: dict[str, Any] = {}
    for batch in batches:
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
            for chunk in chunks:
                state = hashes.setdefault(name, xxhash.xxh3_128(name.encode()))
                _update(state, chunk)
    text = json.dumps({name: h.hexdigest() for name, h in sorted(hashes.items())})
    return xxhash.xxh3_128_hexdigest(text.encode())


def _update(state: Any, column: Any) -> None:
    """Feed the hash with nulls, lengths and values, row by row in separate streams.

    A row's length is hashed apart from its bytes in a stream of its own, so that the
    cut into batches does not show.
    """
    raise NotImplementedError
