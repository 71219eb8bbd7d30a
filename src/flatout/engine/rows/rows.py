"""Interface between the kinds of samples and batching, training and measuring.

A kind of rows (token, array, image rows) is one file of this package with these
members. When sent to another process, the file is opened again instead of copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from flatout.engine.rows.layout import Ints, LaidOut, Layout
from flatout.engine.rows.token_facts import TokenFacts


class Rows(Protocol):
    """Rows that can be divided into micro-batches."""

    def __len__(self) -> int: ...

    def lengths(self, rows: Ints, /) -> Ints:
        """Lengths (N,) of `rows` (N,): tokens; 1 for a fixed shape."""

    def views(self, rows: Ints, column: str = ..., /) -> Sequence[npt.NDArray[Any]]:
        """Values (length,) of each of `rows` (N,)."""

    def labels_of(self, rows: Ints, /) -> npt.NDArray[Any]:
        """Targets (N, ...) of `rows` (N,), int64 or float64."""

    @property
    def has_token_labels(self) -> bool:
        """Return whether tokens have labels, in the view `labels`."""

    def sequences(self, rows: Ints, /) -> tuple[Rows, Ints]:
        """Units within which attention and targets stay: `rows` (N,), or parts of them,
        and their numbers (S,) there."""

    def place_of(self, row: int, /) -> tuple[int, ...]:
        """Position of a row in storage, which seeds its random choices."""

    def lay_out(
        self, rows: Ints, layout: Layout, values: Sequence[Any] | None = None, /
    ) -> LaidOut:
        """Arrays of a micro-batch; `values` replace the rows' own."""


class SplitRows(Rows, Protocol):
    """All rows of one split."""

    @property
    def facts(self) -> TokenFacts:
        """Statistics counted when the rows were written."""

    @property
    def column_names(self) -> list[str]: ...

    @property
    def folder(self) -> Path | None:
        """Folder that they were opened from; None for rows in memory."""

    @property
    def table(self) -> Any:
        """All rows in an Arrow table."""

    @property
    def has_labels(self) -> bool:
        """Return whether rows have labels."""

    def readable(self, row: int, decode: Callable[[Ints], str], /) -> str:
        """Description of a row for people: its text, or its file."""
