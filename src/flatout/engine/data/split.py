"""Splits rows into train, validation and test: stable, without leaks, fully reported.

A row's split depends only on its content: the hash of its key, scaled to [0, 1), is
compared with the fractions. The key of a text is its normalised form (Unicode NFKC,
with case and white space unified), that of an array or an image its values;
with a group column it is the group's name. A row therefore keeps its split when rows
are appended, removed or reordered. Texts that differ only in case and white space, and
equal samples, share a split. Each label is spread in proportion, up to the chance of
independent draws: of a label with n rows,
n * f +- sqrt(n * f * (1 - f)) are in a split of fraction f.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.data.dropped import drop
from flatout.engine.data.folds import FOLD, assign_folds, folds_fault
from flatout.engine.data.labels import reject_labels
from flatout.engine.data.raw_texts import SPLITS
from flatout.engine.data.row_facts import (
    DUPLICATE,
    Codes,
    FactCollector,
    RowFacts,
    first_rows,
    scrambled,
)
from flatout.engine.data.rows import REJECTED_SCHEMA
from flatout.engine.data.split_report import no_row_text, too_many_text
from flatout.engine.files.arrow_folder import Spool
from flatout.engine.parameters import SplitSettings


class SplitError(ValueError):
    """Rows that give no usable split; names rows, reasons and the remedy."""


class SplitPlan(ABC):
    """Assigns each row to a split. Computed at first access in one pass over the raw
    rows; usable rows are written to a spool and read from there afterwards."""

    def __init__(
        self,
        settings: SplitSettings,
        *,
        has_names: bool,
        has_classes: bool,
        kind: str,
    ) -> None:
        """`has_names`: labels are names, one per row (`has_classes`) or in lists.
        `kind`: `texts`, `arrays` or `images`."""
        self.settings, self.raw_name = settings, f"raw_{kind}"
        self.quarantine = f"rejected_{'rows' if kind == 'texts' else kind}"
        self.has_names, self.has_classes = has_names, has_classes
        self._folder: Path | None = None

    @abstractmethod
    def _read_rows(self, collected: FactCollector, spool: Spool) -> None:
        """Read the raw rows once: write the usable rows to `spool`, and add
        the facts about all rows to `collected`."""

    @property
    @abstractmethod
    def report(self) -> dict[str, Any]:
        """Report with `rows_in`, `rows_out`, `rejected` and `rejected_by_reason`."""

    def prepare(self, folder: Path) -> None:
        """Set the folder of the spool: near the output, whose disk has enough room."""
        self._folder = folder

    @cached_property
    def _read(self) -> tuple[FactCollector, Spool]:
        collected, spool = FactCollector(), Spool(self._folder)
        self._read_rows(collected, spool)
        spool.close()
        if not collected.num_raw:
            raise SplitError(f"{self.raw_name} is empty: it has columns but no rows")
        return collected, spool

    @cached_property
    def facts(self) -> RowFacts:
        """Facts about the usable rows."""
        return self._read[0].facts()

    @cached_property
    def _assignments(self) -> tuple[Codes, Any]:
        """Codes (N,) of the usable rows, and the table of all unused rows."""
        facts = self.facts
        codes = assign_splits(facts, self.settings)
        if not (facts.are_given or self.settings.keep_duplicates):
            firsts = first_rows(facts.exact)
            codes[firsts != np.arange(len(firsts))] = DUPLICATE
        elif facts.are_given and self.settings.on_leak == "drop":
            codes[_leaked(facts, codes)] = DUPLICATE
        if given := self.settings.drop_rows:
            drop(codes, facts, given, self.raw_name)
        late = reject_labels(facts, codes) if self.has_names else []
        batches = [*self._read[0].rejected, *late]
        return codes, pa.Table.from_batches(batches, REJECTED_SCHEMA)

    @property
    def codes(self) -> Codes:
        """(N,) indices of usable rows' splits; negative codes: no split."""
        return self._assignments[0]

    @cached_property
    def folds(self) -> npt.NDArray[np.int8]:
        """(N,) fold of each usable row (`split.folds`)."""
        settings = self.settings
        return assign_folds(self.facts, self.codes, settings.folds or 1, settings.seed)

    @property
    def rejected(self) -> Any:
        """Table with REJECTED_SCHEMA of every unusable row."""
        return self._assignments[1]

    def rows(self, split: str) -> Iterator[Any]:
        """Yield RecordBatches of the rows of a split. Raises SplitError if the rows
        are not usable."""
        self.check_usable()
        start = 0
        for batch in self._read[1]:
            part = slice(start, start + batch.num_rows)
            start += batch.num_rows
            mask = self.codes[part] == SPLITS.index(split)
            rows = self._chosen(batch, mask)
            if self.settings.folds:
                rows = rows.append_column(FOLD, pa.array(self.folds[part][mask]))
            yield rows

    def _chosen(self, batch: Any, mask: npt.NDArray[np.bool_]) -> Any:
        """Return the rows of `batch` that `mask` (n,) selects."""
        return batch.filter(pa.array(mask))

    def check_usable(self) -> None:
        """Raise SplitError if too many rows were rejected or a split is unusable."""
        report, limit = self.report, self.settings.max_rejected_fraction
        if report["rejected"] > limit * report["rows_in"]:
            text = too_many_text(report, self.rejected, limit, self.quarantine)
            raise SplitError(f"{text}{self._numbers_hint()}")
        if not any(report["rows_out"].values()):
            raise SplitError(no_row_text(report, self.rejected))
        if self.has_names:
            self._check_labels()
        empty = [name for name in SPLITS if report["rows_out"][name] == 0]
        if empty and self.facts.are_given:
            reports = "split_report"
            if report["rejected"]:
                reports = f"{self.quarantine} and split_report"
            raise SplitError(
                f"no usable row is left in {' and '.join(empty)}; {reports} list the "
                "reasons. Add rows, or remove this split: it is then drawn from train"
            )
        if empty:
            raise SplitError(
                f"no row fell into {' and '.join(empty)}: {report['rows_in']} rows are "
                "too few for split.fractions. Give more rows or raise the fraction"
            )
        if folds := self.settings.folds:
            is_class = self.has_classes
            fault = folds_fault(self.facts, self.folds, folds, has_classes=is_class)
            if fault:
                raise SplitError(fault)

    def _numbers_hint(self) -> str:
        """Return advice for numeric labels that are unlikely to be classes."""
        return ""

    def _check_labels(self) -> None:
        facts = self.facts
        used = np.unique(facts.labels[self.codes >= 0])
        sets = [facts.label_sets[code] for code in used.tolist()]
        names = {name for one in sets for name in one}
        if not names:
            raise SplitError("no row of train has a label. Check split.label_column")
        if len(names) == 1 and self.has_classes:
            several = self.report.get("texts_with_several_labels", 0)
            left = f" ({several:,} texts came with other labels too)" if several else ""
            if self.rejected.num_rows:
                left += f" ({self.rejected.num_rows:,} rows are in {self.quarantine})"
            raise SplitError(one_label_text(names.pop(), left))


def one_label_text(name: str, left: str = "") -> str:
    """Error text for a training set with only one label."""
    return (
        f"every row has the label {name!r}, and a classifier needs two{left}. Add rows "
        "of another label, or check split.label_column and model.task"
    )


def assign_splits(facts: RowFacts, settings: SplitSettings) -> Codes:
    """Return split codes (N,), given or computed from the hashes. A split that is not
    given is drawn by hash from the rows of train."""
    hashes = facts.near if facts.groups is None else facts.groups
    fractions = settings.fractions
    shares = [fractions.train, fractions.validation, fractions.test]
    drawn = [code for code in range(3) if code == 0 or code not in facts.given]
    bounds = np.cumsum([shares[code] for code in drawn])
    places = scrambled(hashes, settings.seed).astype(np.float64) / 2.0**64
    # The last split gets the remaining rows, whatever the sum of the fractions.
    whole = bounds[-1] if facts.are_given else 1.0
    at = np.searchsorted(bounds[:-1] / whole, places, side="right")
    codes: Codes = np.array(drawn, np.int8)[at]
    return np.where(facts.splits > 0, facts.splits, codes)


def _leaked(facts: RowFacts, codes: Codes) -> npt.NDArray[np.bool_]:
    """(N,) mask of train rows whose text is also in another split."""
    starts = first_rows(facts.exact)
    elsewhere = np.zeros(len(starts), bool)
    elsewhere[starts[codes > 0]] = True
    found: npt.NDArray[np.bool_] = elsewhere[starts] & (codes == 0)
    return found
