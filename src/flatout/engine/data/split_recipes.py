"""Recipes of a split's outputs in the catalog, each with its content key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from flatout.engine.data.columns import Columns
from flatout.engine.data.dropped import drop_key
from flatout.engine.data.folds import FOLD
from flatout.engine.data.raw_texts import SPLITS, RawTexts
from flatout.engine.data.split import SplitPlan
from flatout.engine.data.text_split import TextSplit
from flatout.engine.files.arrow_folder import ArrowRecipe
from flatout.engine.files.content_key import ArrowDigest, ContentKey
from flatout.engine.parameters import SplitSettings

FORMAT_VERSION = 4
"""Increase it if the same input would give other rows."""
ROWS_DIGEST = "rows_digest"


@dataclass(frozen=True)
class PlanRecipe:
    """Recipe of one output of a plan."""

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
        """Digest of the rows, stored as `rows` in the key of tokens made from them."""
        return self._facts

    @property
    def schema(self) -> Any:
        schema = self.plan.columns.row_schema
        fold = pa.field(FOLD, pa.int8())
        return schema.append(fold) if self.plan.settings.folds else schema

    def batches(self) -> Iterator[Any]:
        """Yield RecordBatches with `text`, the optional `text_pair` and `label`, and
        the row number in the source. Raises SplitError if the rows are not usable."""
        digest = ArrowDigest()
        for rows in self.plan.rows(self.split):
            # Without row numbers and folds, which change no token.
            digest.update(rows.select(self.plan.columns.row_schema.names[:-1]))
            yield rows
        self._facts[ROWS_DIGEST] = digest.hexdigest()


class RejectedRecipe(PlanRecipe):
    """Recipe of the table of rejected rows."""

    def table(self) -> Any:
        return self.plan.rejected


class ReportRecipe(PlanRecipe):
    """Recipe of the report."""

    def value(self) -> dict[str, Any]:
        self.plan.check_usable()
        return self.plan.report


def plan_split(
    raw: RawTexts, columns: Columns, settings: SplitSettings
) -> dict[str, Any]:
    """Return recipes by catalog name: rejected_rows, the three splits, split_report."""
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
    """Return the options that determine the rows in addition to the raw data."""
    options = settings.model_dump(mode="json", exclude={"drop_rows"})
    if settings.drop_rows:  # absent in keys of earlier versions
        options["drop_rows"] = drop_key(settings.drop_rows)
    if not columns.label:
        options["label_column"] = None
    if not settings.folds:  # rows of earlier versions have no such option
        del options["folds"]
    kind = str(columns.label_type) if columns.has_labels else None
    return {"label_type": kind, "form": columns.form, **options}
