"""What a start must know of rows of a fixed shape, counted when they are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flatout.engine.rows.fixed_lists import values_in
from flatout.engine.rows.token_facts import TokenFacts


@dataclass
class ArrayFacts(TokenFacts):
    """Of the rows of one split. Means and deviations are a number a value of the
    sample; of whole numbers (pixels) one a channel, the last dimension."""

    shape: list[int] = field(default_factory=list)
    """Of one sample."""
    mean: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    """Summed squared differences from the mean."""

    @property
    def deviation(self) -> list[float]:
        """1 where a value never changes: it is standardised to 0."""
        count = max(1, self._values_each(self.num_rows))
        found = np.sqrt(np.array(self.squares) / count)
        result: list[float] = np.where(found > 0, found, 1.0).tolist()
        return result

    def add(self, batch: Any) -> None:
        """Count a record batch with `inputs` and, where there is one, `labels`."""
        if not batch.num_rows:
            return
        values = values_in(batch.column("inputs"))
        self.shape = list(values.shape[1:])
        pixels = values.dtype == np.uint8
        flat = values.reshape(-1, values.shape[-1] if pixels else values[0].size)
        self._merge(flat.astype(np.float64), self._values_each(self.num_rows))
        self.num_rows += batch.num_rows
        self.num_tokens += batch.num_rows
        self.longest = 1
        self._count_labels(batch)

    def _values_each(self, rows: int) -> int:
        """How many values of `rows` each mean is over."""
        places = int(np.prod(self.shape, dtype=np.int64)) // max(1, len(self.mean))
        return rows * places

    def _merge(self, values: Any, known: int) -> None:
        """Values (n, features) beside `known` of each (Chan et al. 1979)."""
        new, mean = len(values), values.mean(0)
        squares = np.square(values - mean).sum(0)
        if known:
            gap, total = mean - np.array(self.mean), known + new
            mean = np.array(self.mean) + gap * new / total
            squares += np.array(self.squares) + gap**2 * known * new / total
        self.mean, self.squares = mean.tolist(), squares.tolist()
