"""Statistics of rows of a fixed shape, computed when they are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flatout.engine.rows.fixed_lists import values_in
from flatout.engine.rows.token_facts import TokenFacts

IMAGE_DIMENSIONS = 3
VALUES_AT_ONCE = 2**22
"""Number of values that are processed at once, as two fp64 copies."""


@dataclass
class ArrayFacts(TokenFacts):
    """Statistics of one split. Means and deviations have one number per value of the
    sample; for images (bytes, three dimensions) one per channel, the last dimension."""

    shape: list[int] = field(default_factory=list)
    """Shape of one sample."""
    mean: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    """Summed squared differences from the mean."""

    @property
    def deviation(self) -> list[float]:
        """Standard deviations; 1 for a constant value, which becomes 0."""
        count = max(1, self._values_each(self.num_rows))
        found = np.sqrt(np.array(self.squares) / count)
        result: list[float] = np.where(found > 0, found, 1.0).tolist()
        return result

    def add(self, batch: Any) -> None:
        if not batch.num_rows:
            return
        values = self._inputs(batch)
        self.shape = list(values.shape[1:])
        pixels = values.dtype == np.uint8 and len(self.shape) == IMAGE_DIMENSIONS
        features = self.shape[-1] if pixels else values[0].size
        rows = max(1, VALUES_AT_ONCE // max(1, values[0].size))
        for start in range(0, len(values), rows):
            part = values[start : start + rows]
            flat = part.reshape(-1, features).astype(np.float64)
            self._merge(flat, self._values_each(self.num_rows))
            self.num_rows += len(part)
        self.num_tokens += batch.num_rows
        self.longest = 1
        self._count_labels(batch)

    def _inputs(self, batch: Any) -> Any:
        """Samples (N, ...) of a record batch."""
        return values_in(batch.column("inputs"))

    def _values_each(self, rows: int) -> int:
        """Number of values of `rows` that each mean covers."""
        places = int(np.prod(self.shape, dtype=np.int64)) // max(1, len(self.mean))
        return rows * places

    def _merge(self, values: Any, known: int) -> None:
        """Merge values (n, features) with the `known` ones (Chan et al. 1979)."""
        new, mean = len(values), values.mean(0)
        squares = np.square(values - mean).sum(0)
        if known:
            gap, total = mean - np.array(self.mean), known + new
            mean = np.array(self.mean) + gap * new / total
            squares += np.array(self.squares) + gap**2 * known * new / total
        self.mean, self.squares = mean.tolist(), squares.tolist()
