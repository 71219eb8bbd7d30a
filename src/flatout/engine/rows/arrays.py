"""Rows of numbers or pixels. All rows have the same shape and need no padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.rows.layout import Ints, LaidOut, LateArray, Layout
from flatout.engine.rows.rows import SplitRows, TokenRowsError, rows_of, values_in
from flatout.engine.rows.token_facts import TokenFacts

IMAGE_DIMENSIONS = 3
VALUES_AT_ONCE = 2**22
"""The number of values per update of the statistics. Values that are not pixels are
copied twice as fp64."""


@dataclass
class ArrayFacts(TokenFacts):
    """Statistics of a split, with a mean and a standard deviation for each value of a
    sample, or for each channel (last dimension) of images (uint8, three dimensions)."""

    shape: list[int] = field(default_factory=list)
    """The shape of a sample."""
    mean: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """The names of the input columns, in order, if the samples are from a table."""
    squares: list[float] = field(default_factory=list)
    """The sums of squared differences from the means."""

    @property
    def deviation(self) -> list[float]:
        """The standard deviations. They are 1 for constant values, so that
        standardising maps these to 0."""
        count = max(1, self._values_each(self.num_rows))
        found = np.sqrt(np.array(self.squares) / count)
        return np.where(found > 0, found, 1.0).tolist()

    def add(self, batch: Any) -> None:
        if not batch.num_rows:
            return
        rows: Any = rows_of(pa.Table.from_batches([batch]))
        rows.sample_shape = tuple(self.shape) if self.num_rows else None
        values = rows.stacked(np.arange(len(rows)))
        self.shape = list(values.shape[1:])
        pixels = values.dtype == np.uint8 and len(self.shape) == IMAGE_DIMENSIONS
        features = self.shape[-1] if pixels else values[0].size
        rows = max(1, VALUES_AT_ONCE // max(1, values[0].size))
        for start in range(0, len(values), rows):
            part = values[start : start + rows]
            found = _of_pixels(part) if pixels else _of_values(part)
            self._merge(*found, part.size // features)
            self.num_rows += len(part)
        self.num_tokens += batch.num_rows
        self.longest = 1
        self._count_labels(batch)

    def _values_each(self, rows: int) -> int:
        """Return how many values of `rows` rows contribute to each mean."""
        places = int(np.prod(self.shape, dtype=np.int64)) // max(1, len(self.mean))
        return rows * places

    def _merge(self, mean: Any, squares: Any, new: int) -> None:
        """Merge the mean (features,) and the sums of squared differences (features,) of
        `new` values into the statistics of earlier values (Chan et al. 1979)."""
        if known := self._values_each(self.num_rows):
            gap, total = mean - np.array(self.mean), known + new
            mean = np.array(self.mean) + gap * new / total
            squares = squares + self.squares + gap**2 * known * new / total
        self.mean, self.squares = mean.tolist(), squares.tolist()


def _of_values(samples: npt.NDArray[Any]) -> tuple[Any, Any]:
    """Return the mean and the sum of squared differences of each value of `samples`
    (n, ...). The first sample is subtracted before, because rounding would otherwise
    give constants such as 0.1 a deviation above 0."""
    values = samples.reshape(len(samples), -1).astype(np.float64)
    first = values[0].copy()
    values -= first
    mean = values.mean(0)
    return mean + first, np.square(values - mean).sum(0)


def _of_pixels(images: npt.NDArray[np.uint8]) -> tuple[Any, Any]:
    """Return the mean and the sum of squared differences of each channel of `images`
    (n, height, width, channels). The sums over all images are integers."""
    flat, channels = images.reshape(len(images), -1), images.shape[-1]
    sums = flat.sum(0, dtype=np.uint64).reshape(-1, channels).sum(0)
    powers = np.square(flat, dtype=np.uint16).sum(0, dtype=np.uint64)
    mean = sums / (images.size // channels)
    return mean, powers.reshape(-1, channels).sum(0) - sums * mean


INPUTS = "inputs"
"""Column of samples, as nested fixed-size lists with one level per dimension."""
SOURCE = "source"
"""Column with the file or row from which a sample comes, for messages."""
BYTES_ONE_BY_ONE = 2**12
"""Rows of at least this size in bytes are copied one by one."""


@dataclass(frozen=True)
class _Chunk:
    """The values and labels of a record batch, as views (N, ...) into its buffers."""

    values: Any
    labels: npt.NDArray[Any] | None
    size: int

    def __len__(self) -> int:
        return self.size


class ArrayRows(SplitRows):
    """Rows with a column `inputs` and optional `labels`, one target per row. Subclasses
    can store samples in another form, from which `inputs` computes those of a batch."""

    kind = "arrays"
    column = INPUTS
    one_shape = True
    facts_class = ArrayFacts
    facts: ArrayFacts  # type: ignore[assignment]
    sample_shape: tuple[int, ...] | None = None
    """The shape that all samples must have. The first samples define it."""

    @cached_property
    def _chunks(self) -> list[_Chunk]:
        with self._named():
            return [
                _Chunk(
                    self.stored(batch),
                    values_in(batch.column("labels")) if self.has_labels else None,
                    batch.num_rows,
                )
                for batch in self.table.to_batches()
            ]

    def stored(self, batch: Any) -> Any:
        """Return the values of a record batch that `inputs` needs, without a copy."""
        return values_in(batch.column(self.column))

    def inputs(self, stored: Any, rows: Ints) -> npt.NDArray[Any]:
        """Return the samples (n, ...) of the rows `rows` (n,) of a record batch.
        `stored` is the result of the method `stored` for this batch."""
        return stored[rows]  # type: ignore[no-any-return]

    def _samples(self, stored: Any, rows: Ints) -> npt.NDArray[Any]:
        """Return the samples (n, ...) of the rows `rows` (n,) of a record batch. Raises
        TokenRowsError if a custom class fails, or if its samples are not numbers or
        differ in shape from earlier ones."""
        if not self._is_custom:  # the check takes longer than copying small samples
            return self.inputs(stored, rows)
        with self._named():
            found = np.asarray(self.inputs(stored, rows))
            if self.sample_shape is None:
                self.sample_shape = found.shape[1:]
            wanted = (len(rows), *self.sample_shape)
            if found.shape != wanted or found.dtype.kind not in "biuf":
                got = f"{found.dtype} of shape {found.shape}"
                raise ValueError(f"inputs returns {got}, not numbers of shape {wanted}")
        return found

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Context manager that turns an error of a custom class into TokenRowsError."""
        try:
            yield
        except Exception as error:
            if not self._is_custom:
                raise
            kind = type(self)
            raise TokenRowsError(
                f"train.rows: {kind.__module__}.{kind.__name__} fails "
                f"({type(error).__name__}: {error}): correct its methods stored and "
                "inputs. Every sample must be an array of numbers of one shape"
            ) from error

    @cached_property
    def _first(self) -> npt.NDArray[Any]:
        return self.stacked(np.zeros(1, np.int64))[0]

    @property
    def row_bytes(self) -> int:
        return self._first.nbytes

    def lengths(self, rows: Ints) -> Ints:
        return np.ones(len(rows), dtype=np.int64)

    def views(self, rows: Ints, column: str = INPUTS) -> Sequence[npt.NDArray[Any]]:
        return list(self.stacked(rows))

    def stacked(self, rows: Ints) -> npt.NDArray[Any]:
        """Return the samples (N, ...) of `rows` (N,)."""
        return self._gather(rows, lambda chunk, at: self._samples(chunk.values, at))

    def lay_out(
        self, rows: Ints, layout: Layout, values: Sequence[Any] | None = None
    ) -> LaidOut:
        """Return the `inputs` (B, ...) of `rows` (B,) as a `LateArray`, which is
        written directly to the batch's buffer. If B is 0, there is one row of zeros."""
        found: Any = None if values is None else np.asarray(values)
        if found is None:
            shape, dtype = (max(1, len(rows)), *self._first.shape), self._first.dtype
            found = LateArray(shape, dtype, lambda out: self._write(rows, out))
        return LaidOut({INPUTS: found}, np.arange(len(rows)))

    def _write(self, rows: Ints, out: npt.NDArray[Any]) -> None:
        """Write `rows` (N,) to `out` (N, ...), directly from the Arrow buffers."""
        if not len(rows):
            out[:] = 0
        elif self.row_bytes < BYTES_ONE_BY_ONE:
            out[:] = self.stacked(rows)
        else:
            chunks, local = self._locate(rows)
            for chunk in np.unique(chunks):
                places = np.flatnonzero(chunks == chunk)
                self._write_part(self._chunks[chunk].values, local[places], out, places)

    def _write_part(
        self, stored: Any, rows: Ints, out: npt.NDArray[Any], places: Ints
    ) -> None:
        """Write the samples `rows` (n,) of a record batch to `out[places]`."""
        if type(self).inputs is not ArrayRows.inputs:
            out[places] = self._samples(stored, rows)
            return
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            out[place] = stored[row]

    def readable(self, row: int, decode: Callable[[Ints], str]) -> str:
        if SOURCE not in self.column_names:
            return f"row {row}"
        return str(self.table.column(SOURCE)[row].as_py())
