"""Images stored as encoded files, which are decoded when a batch is built.

Images are decoded in the loader's workers or, without workers, in threads. The pixels
are the same as in rows that store decoded images.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.machine.environment import usable_cores
from flatout.engine.rows.arrays import ArrayRows
from flatout.engine.rows.layout import Ints

ENCODED = "encoded"
ROWS_AT_ONCE = 256
"""The maximum number of files in memory at a time while rows are written."""


def _each(work: Any, items: Sequence[Any]) -> Iterator[Any]:
    """Yield `work(item)` for each item, in threads except in a loader worker."""
    if current_process().daemon or len(items) < 2:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(usable_cores()) as pool:
        yield from pool.map(work, items)


class EncodedImages(ArrayRows):
    """Rows with the columns `encoded`, `size`, `channels` and optional `labels`. Raises
    BadImage if an image cannot be decoded."""

    kind = "images"
    column = ENCODED
    decodes = True

    def stored(self, batch: Any) -> Any:
        size, channels = (batch.column(n)[0].as_py() for n in ("size", "channels"))
        return batch.column(ENCODED), size, channels

    def inputs(self, stored: Any, rows: Ints) -> npt.NDArray[np.uint8]:
        _, size, channels = stored
        pixels = np.empty((len(rows), size, size, channels), np.uint8)
        self._write_part(stored, rows, pixels, np.arange(len(rows)))
        return pixels

    def _write_part(
        self, stored: Any, rows: Ints, out: npt.NDArray[Any], places: Ints
    ) -> None:
        from flatout.engine.rows.decoding import Decoder  # needs Pillow

        encoded, size, channels = stored
        files = [io.BytesIO(encoded[row].as_buffer()) for row in rows.tolist()]
        decoded = _each(Decoder(size, channels), files)
        for place, one in zip(places.tolist(), decoded, strict=True):
            out[place] = one


def with_files(
    rest: Any, files: Sequence[Path], shape: tuple[int, ...]
) -> Iterator[Any]:
    """Yield record batches with the contents of `files` (N,) and the columns of `rest`,
    which has N rows. The last dimensions of `shape` are the size and the number of
    channels of the decoded images."""
    size, channels = (pa.scalar(number, pa.int16()) for number in shape[-2:])
    for start in range(0, len(files), ROWS_AT_ONCE):
        part, own = rest.slice(start, ROWS_AT_ONCE), files[start : start + ROWS_AT_ONCE]
        columns = {
            ENCODED: pa.array([file.read_bytes() for file in own], pa.large_binary()),
            "size": pa.repeat(size, len(own)),
            "channels": pa.repeat(channels, len(own)),
        }
        columns |= dict(zip(part.schema.names, part.columns, strict=True))
        yield pa.record_batch(columns)
