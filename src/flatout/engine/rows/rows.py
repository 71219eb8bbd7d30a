"""The seam between what a sample is and everything that batches, trains, measures.

A kind of rows (token, array, image rows) is one file of this package that has these
members. It is opened again, not copied, when sent to another process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from flatout.engine.rows.layout import Ints, LaidOut, Layout
from flatout.engine.rows.token_facts import TokenFacts


class Rows(Protocol):
    """What is cut into micro-batches."""

    def __len__(self) -> int: ...

    def lengths(self, rows: Ints, /) -> Ints:
        """Places (N,) that each of `rows` (N,) takes: tokens; 1 for a fixed shape."""

    def views(self, rows: Ints, column: str = ..., /) -> Sequence[npt.NDArray[Any]]:
        """The values (length,) of each of `rows` (N,)."""

    def labels_of(self, rows: Ints, /) -> npt.NDArray[Any]:
        """What `rows` (N,) are to be told: (N, ...), int64 or float64."""

    @property
    def has_token_labels(self) -> bool:
        """Whether tokens have labels of their own, in the view `labels`."""

    def sequences(self, rows: Ints, /) -> tuple[Rows, Ints]:
        """What attention and targets stay within: `rows` (N,), or parts of them, and
        their numbers (S,) there."""

    def place_of(self, row: int, /) -> tuple[int, ...]:
        """Where it is stored, of which chance may depend."""

    def lay_out(
        self, rows: Ints, layout: Layout, values: Sequence[Any] | None = None, /
    ) -> LaidOut:
        """Arrays of a micro-batch; `values` in place of the rows' own."""


class SplitRows(Rows, Protocol):
    """All rows of one split."""

    @property
    def facts(self) -> TokenFacts:
        """Counted when the rows were written."""

    @property
    def column_names(self) -> list[str]: ...

    @property
    def folder(self) -> Path | None:
        """Where they are opened from; None: they are in memory."""

    @property
    def table(self) -> Any:
        """All rows, as Arrow holds them."""

    @property
    def has_labels(self) -> bool:
        """Whether there is something to be told of each row."""

    def readable(self, row: int, decode: Callable[[Ints], str], /) -> str:
        """A row as people know it: its text, its file."""
