"""Statistics of token rows, computed once when the rows are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

UNLABELLED_NAMED = 5
SEQUENCES = "sequence_lengths"
"""Column with the token count of each sequence of a sample, starting with the
anchor."""
AnyFacts = TypeVar("AnyFacts", bound="TokenFacts")


@dataclass
class TokenFacts:
    """Statistics of the rows of a split."""

    num_rows: int = 0
    num_tokens: int = 0
    longest: int = 0
    """The number of tokens in the longest row, or in the longest sequence if samples
    have several."""
    most_sequences: int = 1
    """Maximum number of sequences per sample."""
    largest_id: int = 0
    """The largest token id."""
    label_counts: dict[str, int] = field(default_factory=dict)
    """The number of rows of each class, keyed by class number (a string, as in
    JSON)."""
    num_unlabelled: int = 0
    """The number of rows with token labels but no target after their first token."""
    unlabelled: list[int] = field(default_factory=list)
    """The row numbers of the first UNLABELLED_NAMED rows without a target."""

    @property
    def mean_length(self) -> float:
        return self.num_tokens / max(1, self.num_rows)

    @property
    def largest_sample(self) -> int:
        """An upper bound on the number of tokens per sample."""
        return self.longest * self.most_sequences

    @property
    def labels(self) -> list[int]:
        """The class numbers that occur, in ascending order."""
        return sorted(map(int, self.label_counts))

    def add(self, batch: Any) -> None:
        """Add the rows of a record batch with `input_ids` and optional `labels`."""
        if not batch.num_rows:
            return
        ids = batch.column("input_ids")
        self._count_unlabelled(batch)
        largest = pc.max(ids.flatten()).as_py()
        self.num_rows += batch.num_rows
        self.num_tokens += len(ids.flatten())
        self._count_lengths(batch)
        self.largest_id = max(self.largest_id, -1 if largest is None else largest)
        self._count_labels(batch)

    def _count_lengths(self, batch: Any) -> None:
        lengths = pc.list_value_length(batch.column("input_ids"))
        if SEQUENCES in batch.schema.names:
            parts = batch.column(SEQUENCES)
            most = pc.max(pc.list_value_length(parts)).as_py()
            self.most_sequences = max(self.most_sequences, most)
            lengths = parts.flatten()
        self.longest = max(self.longest, pc.max(lengths).as_py())

    def _count_labels(self, batch: Any) -> None:
        names = batch.schema.names
        if "labels" in names and pa.types.is_integer(batch.column("labels").type):
            found = np.unique(batch.column("labels").to_numpy(), return_counts=True)
            pairs = zip(map(str, found[0].tolist()), found[1].tolist(), strict=True)
            self.label_counts = dict(Counter(self.label_counts) + Counter(dict(pairs)))

    def _count_unlabelled(self, batch: Any) -> None:
        """Count the rows without targets. Their prompts leave no room for
        completions."""
        labels = batch.column("labels") if "labels" in batch.schema.names else None
        if labels is None or not pa.types.is_list(labels.type):
            return
        real = np.append(0, np.cumsum(labels.flatten().to_numpy() >= 0))
        ends = np.append(0, np.cumsum(pc.list_value_length(labels).to_numpy()))
        begins = np.minimum(ends[:-1] + 1, ends[1:])
        rows = np.flatnonzero(real[ends[1:]] == real[begins])
        self.num_unlabelled += len(rows)
        found = (self.num_rows + rows[:UNLABELLED_NAMED]).tolist()
        self.unlabelled = (self.unlabelled + found)[:UNLABELLED_NAMED]

    def as_dict(self) -> dict[str, Any]:
        return {"tokens": asdict(self)}

    @classmethod
    def of(cls: type[AnyFacts], table: Any) -> AnyFacts:
        """Return the statistics of all rows of an Arrow table."""
        facts = cls()
        for batch in table.to_batches():
            facts.add(batch)
        return facts

    @classmethod
    def noted(
        cls: type[AnyFacts], stored: Mapping[str, Any], num_rows: int
    ) -> AnyFacts | None:
        """Return the statistics that are `stored` with `num_rows` rows. Return None if
        they belong to other rows or were written by another version."""
        try:
            facts = cls(**stored["tokens"])
        except (KeyError, TypeError):
            return None
        return facts if facts.num_rows == num_rows else None
