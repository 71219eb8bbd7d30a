"""Checks and splits texts."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import Any

import pyarrow as pa

from flatout.engine.data.columns import Columns, all_numbers
from flatout.engine.data.forms.given_splits import SplitTexts, entry_of
from flatout.engine.data.labels import label_report, label_warnings
from flatout.engine.data.raw_texts import SPLITS, RawTexts, batches_of, named_row
from flatout.engine.data.row_facts import FactCollector
from flatout.engine.data.row_hashes import content_hashes, group_hashes, leaks
from flatout.engine.data.rows import check_batch
from flatout.engine.data.split import SplitError, SplitPlan, assign
from flatout.engine.data.split_report import leak_warnings, split_report, summary_text
from flatout.engine.files.spool import Spool
from flatout.engine.parameters import SplitSettings

logger = logging.getLogger(__name__)

SHOWN_LEAKS = 100
MANY_NUMBERS = 50
"""Number of distinct numeric labels above which they are unlikely to be classes."""


class TextSplit(SplitPlan):
    """Assigns each text to a split."""

    def __init__(
        self, raw: RawTexts, columns: Columns, settings: SplitSettings
    ) -> None:
        columns.check_present(raw)
        super().__init__(
            settings,
            has_names=columns.has_names,
            has_classes=columns.has_classes,
            kind="texts",
        )
        self.raw, self.columns = raw, columns
        if columns.form == "pairs" and columns.label:
            text = "pairs have the score %r (split.label_column; null: no score)"
            logger.info(text, columns.label)

    def _read_rows(self, collected: FactCollector, spool: Spool) -> None:
        number: str | None = None
        only_numbers = True
        for batch in batches_of(self.raw, self.columns.names):
            checked = check_batch(batch, self.columns)
            table = checked.table
            exact, near = content_hashes(table)
            collected.add(
                [batch.source] * table.num_rows,
                exact=exact,
                near=near,
                rows=table.column("source_row").to_numpy(),
                splits=checked.splits,
                label_kinds=checked.label_kinds,
                groups=group_hashes(checked.groups),
            )
            labels = pa.nulls(table.num_rows)
            if self.columns.has_labels:
                labels = table.column("label")
            collected.add_labels(labels)
            num_raw = len(batch.rows) + len(batch.broken)
            collected.reject(checked.rejected, num_raw)
            if num_raw:
                collected.given |= {batch.split, *checked.splits.tolist()} - {-1}
            spool.add(table)
            if table.num_rows and only_numbers:
                texts = table.column("text")
                only_numbers = all_numbers(texts)
                number = texts[0].as_py() if only_numbers else None
        if number is not None:
            text = "split.text_column is %r, and each text in it is a number, as %r"
            logger.warning(
                f"{text}: is that the right column?", self.columns.text, number
            )
        self._check_there(collected)

    def _check_there(self, collected: FactCollector) -> None:
        for name in self.raw.parts if isinstance(self.raw, SplitTexts) else ():
            if collected.num_raw and SPLITS.index(name) not in collected.given:
                raise SplitError(
                    f"{entry_of(name)} is empty: it has columns but no rows. Give it "
                    "rows, or take it out of the catalog: its rows are then taken from "
                    "train"
                )

    @cached_property
    def report(self) -> dict[str, Any]:
        """Return counts, shares and leaks; check that every row is accounted for."""
        facts, codes = self.facts, self.codes
        labels = label_report(facts, codes)
        kept = self.settings.keep_duplicates
        report = split_report(facts, codes, self.rejected, labels, repeats=kept)
        if facts.are_given:
            report["leaks"] = self._leaks()
        logger.info(summary_text(report, self.rejected))
        for warning in (*label_warnings(report), *leak_warnings(report)):
            logger.warning(warning)
        return report

    def _leaks(self) -> list[list[str]]:
        """Return texts that are in several given splits, one row for each split."""
        facts = self.facts
        found = leaks(facts.exact, assign(facts, self.settings))[:SHOWN_LEAKS]
        return [[named_row(facts.at(row)) for row in rows] for rows in found]

    def _numbers_hint(self) -> str:
        sets = self.facts.label_sets if self.columns.has_classes else []
        names = pa.array([name for one in sets for name in one], pa.string())
        if len(names) < MANY_NUMBERS or not all_numbers(names):
            return ""
        return f". The labels are {len(names):,} numbers: model.task: regression?"
