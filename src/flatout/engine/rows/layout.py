"""Layout of token rows in a tensor: right-padded, or concatenated without padding.

All later code handles both layouts alike:
    input_ids      (B, T) right-padded, or (1, P): concatenated rows
    attention_mask (B, T) bool, padded layout only
    position_ids   (1, P), packed layout only: position of each token in its row
    cu_seqlens     (R + 1,) int32, packed layout only: first token of each row, and P
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
    """Array that is written once, directly to its final memory."""

    shape: tuple[int, ...]
    dtype: npt.DTypeLike
    write: Callable[[npt.NDArray[Any]], None]
    """Writes to an array of this shape and type."""

    def made(self) -> npt.NDArray[Any]:
        """Write the array to newly allocated memory."""
        found = np.empty(self.shape, self.dtype)
        self.write(found)
        return found


Arrays = dict[str, Any]
"""numpy arrays, or late ones."""
Shape = tuple[int, int]


@dataclass(frozen=True)
class LaidOut:
    """Rows as the arrays of a micro-batch."""

    fields: Arrays
    starts: Ints
    """(B,) start of each row among all positions of the batch."""


@dataclass(frozen=True)
class Layout:
    """Layout of rows for one model, device and strategy."""

    packed: bool = False
    pad_token_id: int = 0
    pad_to_length: int | None = None
    """Padded layout: pad to this length (`fixed`) instead of the longest row."""
    pad_multiple: int = 1
    """Padded length, or packed total, is rounded up to a multiple of this."""
    row_multiple: int = 1
    """Packed layout: R, and K if it equals R, is rounded up to a multiple of this with
    empty rows and ignored targets, so that few shapes occur."""
    every_place: bool = False
    """Padded layout: positions without a target become ignored targets, so that K is
    the same for all batches of one shape."""
    max_length: int = 512
    """Packed layout: maximum length of the padding rows at the end."""

    def num_padded_tokens(self, lengths: Ints) -> int:
        """Number of tokens in the tensor for rows of `lengths` (B,)."""
        if self.packed:
            return round_up(max(1, int(lengths.sum())), self.pad_multiple)
        return max(1, len(lengths)) * self._width(lengths)

    def lay_out(
        self, sequences: Sequence[Any], columns: Mapping[str, Sequence[Any]]
    ) -> LaidOut:
        """Arrange token ids of B rows, and further columns with one value per token.
        Without rows the result is one padding token."""
        lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
        cut = self._pack(lengths) if self.packed else self._pad(lengths)
        shape, fields, starts = cut
        for name, views in {"input_ids": sequences, **columns}.items():
            fill = self.pad_token_id if name == "input_ids" else 0
            fields[name] = self._fill(views, shape, lengths, fill)
        return LaidOut(fields, starts[: len(sequences)])

    def _width(self, lengths: Ints) -> int:
        longest = int(lengths.max(initial=1))
        # The model may have no positions beyond max_length.
        rounded = min(round_up(longest, self.pad_multiple), self.max_length)
        return self.pad_to_length or max(longest, rounded)

    def _pad(self, lengths: Ints) -> tuple[Shape, Arrays, Ints]:
        """Shape (B, T), fields except the tokens, and the start of each row."""
        lengths = lengths if len(lengths) else np.ones(1, dtype=np.int64)
        shape = (len(lengths), self._width(lengths))
        mask = np.arange(shape[1]) < lengths[:, None]
        return shape, {"attention_mask": mask}, np.arange(shape[0]) * shape[1]

    def _pack(self, lengths: Ints) -> tuple[Shape, Arrays, Ints]:
        """See `_pad`; the shape is (1, P)."""
        total = int(lengths.sum())
        padded = round_up(max(1, total), self.pad_multiple)
        # The rest of the total becomes separate rows of padding.
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
        """Copy rows to a buffer of `shape`: one per line, or concatenated."""
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
    """`values` (n, ...) followed by `fill` up to (size, ...)."""
    padded = np.full((size, *values.shape[1:]), fill, values.dtype)
    padded[: len(values)] = values
    return padded


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
