"""Split texts, and create the recipes of the catalog entries that a split writes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from flatout.engine.data.columns import Columns, all_numbers
from flatout.engine.data.dropped import drop_key
from flatout.engine.data.folds import FOLD
from flatout.engine.data.given_splits import SplitTexts, entry_of
from flatout.engine.data.labels import label_warnings
from flatout.engine.data.raw_texts import SPLITS, RawTexts, named_row
from flatout.engine.data.row_facts import (
    FactCollector,
    content_hashes,
    group_hashes,
    leaks,
)
from flatout.engine.data.rows import check_batch
from flatout.engine.data.split import SplitError, SplitPlan, assign_splits
from flatout.engine.data.split_report import leak_warnings, split_report, summary_text
from flatout.engine.files.arrow_folder import ArrowRecipe, Spool
from flatout.engine.files.content_key import ArrowDigest, ContentKey
from flatout.engine.parameters import SplitSettings

logger = logging.getLogger(__name__)

FORMAT_VERSION = 4
"""Increase this whenever the same input would give different rows."""
ROWS_DIGEST = "rows_digest"
SHOWN_LEAKS = 100
MANY_NUMBERS = 50
"""Minimum number of distinct numeric labels for which a hint suggests regression."""


class TextSplit(SplitPlan):
    """Assigns each text to a split. Raises RawTextsError if `raw` lacks columns."""

    def __init__(
        self, raw: RawTexts, columns: Columns, settings: SplitSettings
    ) -> None:
        columns.check_present(raw)
        label_type = columns.label_type if columns.has_labels else None
        super().__init__(settings, label_type, kind="texts")
        self.raw, self.columns = raw, columns
        if columns.form == "pairs" and columns.label:
            text = "pairs have the score %r (split.label_column; null: no score)"
            logger.info(text, columns.label)

    def _read_rows(self, collected: FactCollector, spool: Spool) -> None:
        first: Any = None
        for batch in self.raw.batches(self.columns.names):
            checked = check_batch(batch, self.columns)
            table = checked.table
            exact, near = content_hashes(table)
            collected.add(
                [batch.source] * table.num_rows,
                exact=exact,
                near=near,
                rows=table.column("source_row").to_numpy(),
                splits=checked.splits,
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
            if first is None and table.num_rows:
                first = table.column("text")
        if first is not None and all_numbers(first):
            logger.warning(
                "split.text_column is %r, and its first texts are numbers, such as %r: "
                "is that the right column?",
                self.columns.text,
                first[0].as_py(),
            )
        self._check_not_empty(collected)

    def _check_not_empty(self, collected: FactCollector) -> None:
        for name in self.raw.parts if isinstance(self.raw, SplitTexts) else ():
            if collected.num_raw and SPLITS.index(name) not in collected.given:
                raise SplitError(
                    f"{entry_of(name)} is empty: it has columns but no rows. Add rows, "
                    "or remove the entry from the catalog: the split is then drawn "
                    "from train"
                )

    @cached_property
    def report(self) -> dict[str, Any]:
        """The split report, with row counts, label fractions and leaks."""
        facts, codes = self.facts, self.codes
        kept = self.settings.keep_duplicates
        report = split_report(facts, codes, self.rejected, repeats=kept)
        if facts.are_given:
            given = leaks(facts.exact, assign_splits(facts, self.settings))
            report["leaks"] = [
                [named_row(facts.at(row)) for row in rows]
                for rows in given[:SHOWN_LEAKS]
            ]
        logger.info(summary_text(report, self.rejected))
        for warning in (*label_warnings(report), *leak_warnings(report)):
            logger.warning(warning)
        return report

    def _numbers_hint(self) -> str:
        sets = self.facts.label_sets if self.has_classes else []
        names = pa.array([name for one in sets for name in one], pa.string())
        if len(names) < MANY_NUMBERS or not all_numbers(names):
            return ""
        return f". The labels are {len(names):,} numbers: model.task: regression?"


@dataclass(frozen=True)
class PlanRecipe:
    """Recipe of a catalog entry that is created from a split plan."""

    key: ContentKey
    plan: SplitPlan

    def prepare(self, folder: Path) -> None:
        self.plan.prepare(folder)


@dataclass(frozen=True)
class TextsRecipe(PlanRecipe, ArrowRecipe):
    """Recipe of the rows of one split."""

    plan: TextSplit
    split: str
    _facts: dict[str, Any] = field(default_factory=dict, repr=False)

    def facts(self) -> dict[str, Any]:
        """Return the digest of the rows. The content key of the token rows includes
        this digest. The dict is empty until the last batch has been yielded."""
        return self._facts

    @property
    def schema(self) -> Any:
        schema = self.plan.columns.row_schema
        fold = pa.field(FOLD, pa.int8())
        return schema.append(fold) if self.plan.settings.folds else schema

    def batches(self) -> Iterator[Any]:
        """Yield RecordBatches with the columns of `schema`, for example `text`, `label`
        and `source_row`. Raises SplitError if the rows are not usable."""
        digest = ArrowDigest()
        for rows in self.plan.rows(self.split):
            # Row numbers and folds are left out because they do not affect tokens.
            digest.update(rows.select(self.plan.columns.row_schema.names[:-1]))
            yield rows
        self._facts[ROWS_DIGEST] = digest.hexdigest()


class RejectedRecipe(PlanRecipe):
    """Recipe of the table that contains the rejected rows."""

    def table(self) -> Any:
        return self.plan.rejected


class ReportRecipe(PlanRecipe):
    """Recipe of the split report."""

    def value(self) -> dict[str, Any]:
        self.plan.check_usable()
        return self.plan.report


def plan_split(
    raw: RawTexts, columns: Columns, settings: SplitSettings
) -> dict[str, Any]:
    """Return the recipes of the rejected rows, the rows of each split and the split
    report, by the name of the catalog entry. Raises RawTextsError if columns are
    missing."""
    columns = columns.among(raw.column_names)
    plan = TextSplit(raw, columns, settings)
    fields = {
        "format": FORMAT_VERSION,
        "raw_texts": raw.digest(columns.names),
        **split_options(columns, settings),
    }

    def key(result: str) -> ContentKey:
        return ContentKey({**fields, "result": result})

    return {
        "rejected_rows": RejectedRecipe(key("rejected_rows"), plan),
        **{f"{s}_rows": TextsRecipe(key(f"{s}_rows"), plan, s) for s in SPLITS},
        "split_report": ReportRecipe(key("split_report"), plan),
    }


def split_options(columns: Columns, settings: SplitSettings) -> dict[str, Any]:
    """Return the options that, together with the raw data, determine the rows."""
    options = settings.model_dump(mode="json", exclude={"drop_rows"})
    if settings.drop_rows:  # Keys of earlier versions lack this field.
        options["drop_rows"] = drop_key(settings.drop_rows)
    if not columns.label:
        options["label_column"] = None
    if not settings.folds:  # Keys of earlier versions lack this field.
        del options["folds"]
    kind = str(columns.label_type) if columns.has_labels else None
    return {"label_type": kind, "form": columns.form, **options}
