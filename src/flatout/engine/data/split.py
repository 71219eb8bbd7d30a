"""Train, validation and test rows: stable, without leaks, nothing lost in silence.

A row's split depends on its own content alone: the text is brought to one form
(Unicode NFKC, case and white space evened out) and hashed, and the hash, taken as a
number in [0, 1), is compared with the fractions. So a row keeps its split when rows
are appended, removed or put in another order; texts that are the same but for case
and space share a split; every label is spread in proportion, up to the chance of
independent draws: a label of n rows has n * f +- sqrt(n * f * (1 - f)) of them in a
split of fraction f. With a group column the group's name is hashed instead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from flatout.engine.data.arrow_folder import ArrowRecipe
from flatout.engine.data.content_key import ContentKey
from flatout.engine.data.label_checks import reject_labels
from flatout.engine.data.label_report import label_warnings
from flatout.engine.data.raw_texts import RawTexts, batches_of
from flatout.engine.data.row_facts import FactCollector, RowFacts
from flatout.engine.data.row_hashes import repeats, scrambled
from flatout.engine.data.rows import (
    REJECTED_SCHEMA,
    Columns,
    check_batch,
)
from flatout.engine.data.split_report import (
    DUPLICATE,
    REJECTED,
    SPLITS,
    Codes,
    split_report,
    too_many_text,
)
from flatout.engine.settings import SplitSettings

logger = logging.getLogger(__name__)

FORMAT_VERSION = 3
"""Raise it when the same input would give other rows."""


class SplitError(ValueError):
    """Rows that make no usable split; names rows, reasons and what to do."""


class SplitPlan:
    """Which split each row goes to. Computed when first asked for, in one pass."""

    def __init__(
        self, raw: RawTexts, columns: Columns, settings: SplitSettings
    ) -> None:
        columns.check_present(raw)
        self.raw, self.columns, self.settings = raw, columns, settings

    @cached_property
    def _read(self) -> tuple[RowFacts, list[Any]]:
        return _first_pass(self.raw, self.columns)

    @cached_property
    def _decided(self) -> tuple[Codes, list[Any]]:
        """Codes (N,) of the good rows, and batches of rows rejected on the whole."""
        facts, _ = self._read
        codes = _assign(facts, self.settings)
        codes[repeats(facts.exact)] = DUPLICATE
        late = []
        if self.columns.label and not self.columns.regression:
            late = reject_labels(facts, codes)
        return codes, late

    @cached_property
    def codes(self) -> Codes:
        """(rows cut into columns,) 0, 1, 2 for the splits, REJECTED or DUPLICATE."""
        facts, _ = self._read
        codes = np.full(facts.num_cut, REJECTED, np.int8)
        codes[facts.positions] = self._decided[0]
        return codes

    @cached_property
    def rejected(self) -> Any:
        """Table with REJECTED_SCHEMA of every row that cannot be used."""
        batches = [*self._read[1], *self._decided[1]]
        return pa.Table.from_batches(batches, REJECTED_SCHEMA)

    @cached_property
    def report(self) -> dict[str, Any]:
        """Counts, shares and leaks; checks that no row is unaccounted for."""
        report = split_report(self._read[0], self._decided[0], self.rejected)
        parts = ", ".join(f"{n:,} {name}" for name, n in report["rows_out"].items())
        logger.info(
            "%s rows in: %s; %s rejected, %s duplicates",
            *(f"{report['rows_in']:,}", parts),
            *(f"{report[name]:,}" for name in ("rejected", "duplicates")),
        )
        for warning in label_warnings(report):
            logger.warning(warning)
        return report

    def check_usable(self) -> None:
        """Raises SplitError where too much was rejected, or a split is unusable."""
        report, limit = self.report, self.settings.max_rejected_fraction
        if report["rejected"] > limit * report["rows_in"]:
            raise SplitError(too_many_text(report, self.rejected, limit))
        if self.columns.label and not self.columns.regression:
            _check_labels(report)
        empty = [name for name in SPLITS if report["rows_out"][name] == 0]
        if empty:
            raise SplitError(
                f"no row fell into {' and '.join(empty)}: {report['rows_in']} rows are "
                "too few for split.fractions. Give more rows or raise the fraction"
            )


def _first_pass(raw: RawTexts, columns: Columns) -> tuple[RowFacts, list[Any]]:
    collected = FactCollector()
    for batch in batches_of(raw, columns.names):
        checked = check_batch(batch, columns)
        collected.add(checked, batch.source, len(batch.rows), len(batch.broken))
    if not collected.num_raw:
        raise SplitError("raw_texts is empty: it has columns but no rows")
    return collected.facts(), collected.rejected


def _assign(facts: RowFacts, settings: SplitSettings) -> Codes:
    """Split codes (N,) from the hashes alone."""
    hashes = facts.near if facts.groups is None else facts.groups
    fractions = settings.fractions
    bounds = np.array([fractions.train, fractions.train + fractions.validation])
    places = scrambled(hashes, settings.seed).astype(np.float64) / 2.0**64
    codes: Codes = np.searchsorted(bounds, places, side="right").astype(np.int8)
    return codes


def _check_labels(report: dict[str, Any]) -> None:
    if report["labels"] == 1:
        (name,) = report["label_shares"]["train"]
        several = report["texts_with_several_labels"]
        left = f" ({several:,} texts came with other labels too)" if several else ""
        raise SplitError(
            f"every row has the label {name!r}: there is nothing to tell apart{left}. "
            "Check split.label_column"
        )


@dataclass(frozen=True)
class RowsRecipe(ArrowRecipe):
    """How to make the rows of one split."""

    key: ContentKey
    plan: SplitPlan
    split: str

    @property
    def schema(self) -> Any:
        return self.plan.columns.row_schema

    def batches(self) -> Iterator[Any]:
        """RecordBatches with `text`, `text_pair`, `label` (as there are) and the row
        number in the source. Raises SplitError where the rows are not usable."""
        plan, code, start = self.plan, SPLITS.index(self.split), 0
        plan.check_usable()
        for batch in batches_of(plan.raw, plan.columns.names):
            checked = check_batch(batch, plan.columns)
            codes = plan.codes[start : start + len(batch.rows)][checked.good]
            start += len(batch.rows)
            yield checked.table.filter(pa.array(codes == code))
        if start != len(plan.codes):
            raise SplitError("raw_texts changed while it was read: run again")


@dataclass(frozen=True)
class RejectedRecipe:
    """How to make the table of rejected rows."""

    key: ContentKey
    plan: SplitPlan

    def table(self) -> Any:
        return self.plan.rejected


@dataclass(frozen=True)
class ReportRecipe:
    """How to make the split report."""

    key: ContentKey
    plan: SplitPlan

    def value(self) -> dict[str, Any]:
        self.plan.check_usable()
        return self.plan.report


def plan_split(
    raw: RawTexts, columns: Columns, settings: SplitSettings
) -> dict[str, Any]:
    """Recipes by catalog name: rejected_rows, the three splits, split_report."""
    plan = SplitPlan(raw, columns, settings)
    fields = {
        "format": FORMAT_VERSION,
        "raw_texts": raw.digest(columns.names),
        "regression": columns.regression,
        **settings.model_dump(mode="json"),
    }
    if not columns.label:
        fields["label_column"] = None
    keys = {name: ContentKey({**fields, "result": name}) for name in _RESULTS}
    rows = {f"{s}_rows": RowsRecipe(keys[f"{s}_rows"], plan, s) for s in SPLITS}
    return {
        "rejected_rows": RejectedRecipe(keys["rejected_rows"], plan),
        **rows,
        "split_report": ReportRecipe(keys["split_report"], plan),
    }


_RESULTS = ("rejected_rows", *(f"{s}_rows" for s in SPLITS), "split_report")
