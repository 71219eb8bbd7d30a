"""Assign rows to the splits train, validation and test, stably and without leaks.

The split of a row depends only on its content: a hash of its key, scaled to [0, 1), is
compared with the fractions. The key of a text is the text with case, whitespace and
Unicode form (NFKC) normalised. The key of an array or an image is its values. If there
is a group column, the key is the group's name. A row therefore keeps its split if other
rows are appended, removed or reordered. Without a group column, texts that differ only
in case and whitespace are in the same split, and so are equal samples.

Splits are not stratified: labels are distributed as if each row were drawn
independently at random. A split of fraction f contains n * f +- sqrt(n * f * (1 - f))
of n rows with the same label.
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

from flatout.engine.data.columns import is_names
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
    """Raised if rows cannot be split. The message lists reasons and suggests a fix."""


class SplitPlan(ABC):
    """Assigns each row to a split. On first access, the raw rows are read in a single
    pass, and the usable rows are written to a temporary file for later passes."""

    def __init__(self, settings: SplitSettings, label_type: Any, kind: str) -> None:
        """`label_type` is the Arrow type of the labels, or None if there are none.
        `kind` is `texts`, `arrays` or `images`."""
        self.settings, self.raw_name = settings, f"raw_{kind}"
        self.quarantine = f"rejected_{'rows' if kind == 'texts' else kind}"
        # Each label is a class name, or else may be a list of class names.
        self.has_classes = label_type is not None and pa.types.is_string(label_type)
        self.has_names = self.has_classes or is_names(label_type)
        self._folder: Path | None = None

    @abstractmethod
    def _read_rows(self, collected: FactCollector, spool: Spool) -> None:
        """Read the raw rows once, write the usable rows to `spool`, and add the hashes
        and labels of these rows, and the rejected rows, to `collected`."""

    @property
    @abstractmethod
    def report(self) -> dict[str, Any]:
        """The split report: `row_counts`, and statistics of the labels and rows."""

    def prepare(self, folder: Path) -> None:
        """Set the folder for the temporary files with the usable rows. `folder` should
        be on the same disk as the output, which needs space for these rows anyway."""
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
        """Data about the usable rows."""
        return self._read[0].facts()

    @cached_property
    def _assignments(self) -> tuple[Codes, Any]:
        """The codes (N,) of the usable rows, and a table of all rejected rows."""
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
        """Index of each usable row's split (N,), negative if it is in no split."""
        return self._assignments[0]

    @cached_property
    def folds(self) -> npt.NDArray[np.int8]:
        """Fold number of each usable row (N,), from 0 to `split.folds` - 1, or -1 for
        rows that are in no split."""
        settings = self.settings
        return assign_folds(self.facts, self.codes, settings.folds or 1, settings.seed)

    @property
    def rejected(self) -> Any:
        """Table of all rejected rows with REJECTED_SCHEMA."""
        return self._assignments[1]

    def rows(self, split: str) -> Iterator[Any]:
        """Yield the rows of a split as RecordBatches. Raises SplitError if too many
        rows were rejected or a split cannot be used."""
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
        """Return the rows of `batch` selected by `mask` (n,)."""
        return batch.filter(pa.array(mask))

    def check_usable(self) -> None:
        """Raise SplitError if too many rows were rejected, if a split is empty, or if
        the labels or folds cannot be used."""
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
                f"no row fell into {' and '.join(empty)}: {self._units()} are too few "
                "for split.fractions. Give more of them or raise the fraction"
            )
        if folds := self.settings.folds:
            is_class = self.has_classes
            fault = folds_fault(self.facts, self.folds, folds, has_classes=is_class)
            if fault:
                raise SplitError(fault)

    def _units(self) -> str:
        """Return a text such as `90 rows`, or the number of groups if there are any."""
        if (groups := self.facts.groups) is None:
            return f"{self.report['rows_in']} rows"
        column = self.settings.group_column or self.settings.query_column
        return f"{len(np.unique(groups))} values of the column {column}"

    def _numbers_hint(self) -> str:
        """Return a hint if the labels are numbers that are unlikely to be classes."""
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
    """Return the error message for data with only the label `name`. `left` is inserted
    as an explanation of why rows with other labels are missing."""
    return (
        f"every row has the label {name!r}, and a classifier needs two{left}. Add rows "
        "of another label, or check split.label_column and model.task"
    )


def assign_splits(facts: RowFacts, settings: SplitSettings) -> Codes:
    """Return the index in SPLITS of each row's split (N,). If the data provides only
    some of the splits, the rows of the other splits are drawn from train by hash."""
    hashes = facts.near if facts.groups is None else facts.groups
    fractions = settings.fractions
    shares = [fractions.train, fractions.validation, fractions.test]
    drawn = [code for code in range(3) if code == 0 or code not in facts.given]
    bounds = np.cumsum([shares[code] for code in drawn])
    places = scrambled(hashes, settings.seed).astype(np.float64) / 2.0**64
    # The last split gets all remaining rows, even if the fractions do not add up to 1.
    whole = bounds[-1] if facts.are_given else 1.0
    at = np.searchsorted(bounds[:-1] / whole, places, side="right")
    codes: Codes = np.array(drawn, np.int8)[at]
    return np.where(facts.splits > 0, facts.splits, codes)


def _leaked(facts: RowFacts, codes: Codes) -> npt.NDArray[np.bool_]:
    """Return a mask (N,) of the train rows whose text is also in another split."""
    starts = first_rows(facts.exact)
    elsewhere = np.zeros(len(starts), bool)
    elsewhere[starts[codes > 0]] = True
    found: npt.NDArray[np.bool_] = elsewhere[starts] & (codes == 0)
    return found
