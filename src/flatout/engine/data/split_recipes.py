"""How to make what a split leaves in the catalog, each with its key of content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.engine.data.columns import Columns
from flatout.engine.data.raw_texts import SPLITS, RawTexts
from flatout.engine.data.split import SplitPlan
from flatout.engine.data.text_split import TextSplit
from flatout.engine.files.arrow_folder import ArrowRecipe
from flatout.engine.files.content_key import ArrowDigest, ContentKey
from flatout.engine.parameters import SplitSettings

FORMAT_VERSION = 4
"""Raise it when the same input would give other rows."""
ROWS_DIGEST = "rows_digest"


@dataclass(frozen=True)
class PlanRecipe:
    """How to make what a plan gives."""

    key: ContentKey
    plan: SplitPlan

    def prepare(self, folder: Path) -> None:
        self.plan.prepare(folder)


@dataclass(frozen=True)
class TextsRecipe(PlanRecipe, ArrowRecipe):
    """How to make the rows of one split."""

    plan: TextSplit
    split: str
    _facts: dict[str, Any] = field(default_factory=dict, repr=False)

    def facts(self) -> dict[str, Any]:
        """The digest that the key of tokens made from these rows holds as `rows`."""
        return self._facts

    @property
    def schema(self) -> Any:
        return self.plan.columns.row_schema

    def batches(self) -> Iterator[Any]:
        """RecordBatches with `text`, `text_pair`, `label` (as there are) and the row
        number in the source. Raises SplitError where the rows are not usable."""
        digest = ArrowDigest()
        for rows in self.plan.rows(self.split):
            digest.update(rows.select(self.schema.names[:-1]))  # not their numbers
            yield rows
        self._facts[ROWS_DIGEST] = digest.hexdigest()


class RejectedRecipe(PlanRecipe):
    """How to make the table of rejected rows."""

    def table(self) -> Any:
        return self.plan.rejected


class ReportRecipe(PlanRecipe):
    """How to make the report."""

    def value(self) -> dict[str, Any]:
        self.plan.check_usable()
        return self.plan.report


def plan_split(
    raw: RawTexts, columns: Columns, settings: SplitSettings
) -> dict[str, Any]:
    """Recipes by catalog name: rejected_rows, the three splits, split_report."""
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
    """What decides the rows beside the raw data."""
    options = settings.model_dump(mode="json")
    if not columns.label:
        options["label_column"] = None
    kind = str(columns.label_type) if columns.has_labels else None
    return {"label_type": kind, "form": columns.form, **options}
