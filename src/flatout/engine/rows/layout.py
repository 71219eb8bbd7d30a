"""Lay out token rows in a tensor, right-padded or concatenated without padding.

All later code handles both layouts with the same fields:
    input_ids      (B, T) right-padded rows, or (1, P) concatenated rows
    attention_mask (B, T) bool, only in the padded layout
    position_ids   (1, P), only in the packed layout: position of each token in its row
    cu_seqlens     (R + 1,) int32, only packed: first token of each row, followed by P
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LateArray:
    """An array whose values are computed later, directly in their final location."""

    shape: tuple[int, ...]
    dtype: npt.DTypeLike
    write: Callable[[npt.NDArray[Any]], None]
    """Writes the values to an array of this shape and dtype."""


Arrays = dict[str, Any]
"""NumPy arrays or `LateArray` objects, by field name."""
Shape = tuple[int, int]


@dataclass(frozen=True)
class LaidOut:
    """The arrays of a micro-batch, by field name."""

    fields: Arrays
    starts: Ints
    """The position of each row's first token in the flattened batch, of shape (B,)."""


@dataclass(frozen=True)
class Layout:
    """Defines how rows are laid out for a model, a device and a batching strategy."""

    packed: bool = False
    pad_token_id: int = 0
    pad_to_length: int | None = None
    """The length to which the padded layout pads rows (`fixed`), or None to pad to the
    longest row."""
    pad_multiple: int = 1
    """The padded length or the packed total is rounded up to a multiple of this
    number."""
    row_multiple: int = 1
    """In the packed layout, empty rows are added until the number of rows R is a
    multiple of this number, which limits the number of shapes. For tasks with one
    target per row, ignored targets are added too."""
    every_place: bool = False
    """Whether all positions of the padded layout are targets, some of which are
    ignored. All batches of one shape then have the same number of targets K."""
    max_length: int = 512
    """The maximum length of a row. The padded layout does not round lengths up beyond
    it. The packed layout divides its padding into rows of at most this length."""

    def num_padded_tokens(self, lengths: Ints) -> int:
        """Return the number of tokens, with padding, of rows of `lengths` (B,)."""
        if self.packed:
            return round_up(max(1, int(lengths.sum())), self.pad_multiple)
        return max(1, len(lengths)) * self._width(lengths)

    def lay_out(
        self, sequences: Sequence[Any], columns: Mapping[str, Sequence[Any]]
    ) -> LaidOut:
        """Arrange the token ids of B rows, and `columns` with one value per token, in
        tensors. If there are no rows, return a single padding token."""
        lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
        arrange = self._pack if self.packed else self._pad
        shape, fields, starts = arrange(lengths)
        for name, views in {"input_ids": sequences, **columns}.items():
            fill = self.pad_token_id if name == "input_ids" else 0
            fields[name] = self._fill(views, shape, lengths, fill)
        return LaidOut(fields, starts[: len(sequences)])

    def _width(self, lengths: Ints) -> int:
        longest = int(lengths.max(initial=1))
        # The model may not have positions beyond max_length.
        rounded = min(round_up(longest, self.pad_multiple), self.max_length)
        return self.pad_to_length or max(longest, rounded)

    def _pad(self, lengths: Ints) -> tuple[Shape, Arrays, Ints]:
        """Return the shape (B, T), the fields other than the tokens, and the first
        position of each row."""
        lengths = lengths if len(lengths) else np.ones(1, dtype=np.int64)
        shape = (len(lengths), self._width(lengths))
        mask = np.arange(shape[1]) < lengths[:, None]
        return shape, {"attention_mask": mask}, np.arange(shape[0]) * shape[1]

    def _pack(self, lengths: Ints) -> tuple[Shape, Arrays, Ints]:
        """Return the same values as `_pad`, for the packed layout with shape (1, P)."""
        total = int(lengths.sum())
        padded = round_up(max(1, total), self.pad_multiple)
        # The remaining positions become separate rows of padding.
        filler = np.arange(total, padded, self.max_length)[1:]
        tail = [padded] if padded > total else []
        bounds = np.concatenate([[0], np.cumsum(lengths), filler, tail]).astype(int)
        positions = np.arange(padded) - np.repeat(bounds[:-1], np.diff(bounds))
        num_rows = round_up(len(bounds) - 1, self.row_multiple)
        cu_seqlens = pad_end(bounds, num_rows + 1, padded).astype(np.int32)
        fields: Arrays = {"position_ids": positions[None], "cu_seqlens": cu_seqlens}
        return (1, padded), fields, bounds

    def _fill(
        self, views: Sequence[Any], shape: Shape, lengths: Ints, fill: int
    ) -> npt.NDArray[np.int64]:
        """Return `views`, one per row, as an array of `shape`, padded with `fill`."""
        buffer = np.full(shape, fill, dtype=np.int64)
        if not len(views):
            return buffer
        joined = np.concatenate(views)
        if self.packed:
            buffer[0, : len(joined)] = joined
        else:
            buffer[np.arange(shape[1]) < lengths[:, None]] = joined
        return buffer


def pad_end(values: npt.NDArray[Any], size: int, fill: Any) -> npt.NDArray[Any]:
    """Return `values` (n, ...), padded at the end with `fill` to (size, ...)."""
    padded = np.full((size, *values.shape[1:]), fill, values.dtype)
    padded[: len(values)] = values
    return padded


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
